"""certvit finetune: train for accuracy, or for certified accuracy; from a checkpoint, or from scratch after init."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from certcli.cli import options
from certcli.cli.output import Sink, percent


def finetune(
    ckpt: options.CheckpointArgument,
    output: options.Output = None,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    loss: Annotated[str, typer.Option(help="ce, or margin (certified training; needs a bound).")] = "margin",
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="Radius of the margin loss, pixel l2.")] = 0.5,
    epochs: Annotated[int, typer.Option(help="Passes over the training images; the cosine ends with them.")] = 40,
    optimiser: Annotated[
        str | None,
        typer.Option(
            "--optimiser", "--optimizer", help="adamw, sgd, or stiefel (matrices kept orthogonal; margin's default)."
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate; 0.01 with stiefel (of biases, residual weights, head), else 0.001."),
    ] = None,
    stiefel_lr: Annotated[float, typer.Option(help="Learning rate of the orthogonal matrices.")] = 0.05,
    weight_decay: Annotated[float, typer.Option(help="Of adamw and sgd.")] = 0.05,
    warmup: Annotated[float, typer.Option(help="Share of the steps with a rising learning rate.")] = 0.02,
    ramp: Annotated[float, typer.Option(help="Share of the steps in which epsilon rises to its value.")] = 0.3,
    label_smoothing: Annotated[float, typer.Option(help="Of the cross entropy.")] = 0.0,
    noise: Annotated[float, typer.Option(help="Deviation of Gaussian pixel noise on training images.")] = 0.0,
    patience: Annotated[int | None, typer.Option(help="Stop after so many epochs without improvement.")] = None,
    limit: options.Limit = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same command.")
    ] = False,
    arch: options.Arch = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch_size: options.BatchSize = 128,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train on --dataset; choices are made on its validation split, and the bound at the end is proven."""
    from certcli import data, models
    from certcli.cli.inputs import hints, output_path, pick_device, remember_dataset
    from certcli.errors import DataError
    from certcli.finetune.loop import Diverged, Trainer, identity
    from certcli.finetune.losses import NEEDS_BOUND
    from certcli.finetune.settings import FinetuneSettings
    from certcli.finetune.state import load_state, save_state
    from certcli.foreign import open_checkpoint

    sink = Sink(as_json, quiet)
    optimiser = optimiser or ("stiefel" if loss in NEEDS_BOUND else "adamw")
    lr = (0.01 if optimiser == "stiefel" else 0.001) if lr is None else lr
    settings = FinetuneSettings(
        loss=loss,
        epsilon=epsilon,
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
        lr=lr,
        stiefel_lr=stiefel_lr,
        weight_decay=weight_decay,
        warmup=warmup,
        ramp=ramp,
        label_smoothing=label_smoothing,
        noise=noise,
        patience=patience,
        seed=seed,
    )
    path = output_path(output, ckpt, "finetune", force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    name = dataset or record.dataset
    if name is None:
        raise DataError(
            "no --dataset given, and the checkpoint does not say what it was trained on", "--dataset digits"
        )
    train, validation = (
        data.require_classes(data.load(name, record.input, split, data_dir), record.classes, record.class_names)
        for split in ("train", "val")
    )
    train = train.limit(limit, seed)
    sink.note(f"{len(train)} training and {len(validation)} validation images of {train.name}")

    model = models.load(checkpoint, pick_device(device), writable=True)
    run = identity(checkpoint.digest, settings, f"{train.name}:{len(train)}")
    trainer = Trainer(model, settings, record.classes, run)
    state_path = path.with_name(f"{path.name.removesuffix('.safetensors')}.state.safetensors")
    if resume and state_path.exists():
        trainer.restore(load_state(state_path, run))
        sink.note(f"going on after epoch {trainer.epoch} of {epochs}")
    diverged: Diverged | None = None
    with sink.progress("finetune", total=epochs) as bar:
        bar.advance(trainer.epoch)
        try:
            for epoch in trainer.run(train, validation):
                save_state(state_path, trainer.state())
                sink.document(asdict(epoch))
                certified = (
                    "" if epoch.certified_estimate is None else f", about {percent(epoch.certified_estimate)} certified"
                )
                bar.advance(remark=f"loss {epoch.loss:.3f}, clean {percent(epoch.clean)}{certified}")
        except Diverged as failure:
            if trainer.best_epoch < 0:
                raise
            diverged = failure
    derived = checkpoint.derive(
        trainer.best_net, "finetune", {**settings.parameters(), "dataset": train.name, "images": len(train)}, seed
    )
    derived = replace(derived, record=remember_dataset(derived.record, train))
    final = _prove(derived, validation, epsilon, sink)
    derived = derived.with_evidence("finetune", {"split": "val", "epsilon": epsilon}, final)
    derived.write(path, force)
    if diverged is not None:
        sink.note(f"wrote {path}: the best weights before it, of epoch {trainer.best_epoch}")
        raise diverged
    Path(state_path).unlink(missing_ok=True)
    sink.document({"done": True, "output": str(path), "epoch": trainer.best_epoch, **final})
    sink.text(
        f"wrote {path}: epoch {trainer.best_epoch}, validation clean {percent(final['clean'])}, "
        f"certified at {epsilon:g} {percent(final['certified'])}, bound {final['upper_text']} (proven)"
    )


def _prove(checkpoint, validation, epsilon: float, sink: Sink) -> dict:  # type: ignore[no-untyped-def]
    """The proven bound, and the validation images certified by it: float64, rounded outward."""
    import torch

    from certcli.certify.certificate import summarise
    from certcli.certify.lipschitz import METHOD, certify, plain_accuracy
    from certcli.cli.inputs import load_double
    from certcli.lipschitz.propagate import bound_network

    model = load_double(checkpoint, torch.device("cpu"))
    bound = bound_network(model, checkpoint.record.input.size, checkpoint.record.classes)
    text = {"upper_text": str(bound.upper)}
    if bound.pairs is None:
        sink.note(f"no finite bound: {bound.bound.why}")
        return {"clean": plain_accuracy(model, validation), "certified": 0.0, "upper": "inf", **text}
    rows = [row for batch in certify(model, bound.pairs, validation, 256) for row in batch]
    summary = summarise(rows, [epsilon], METHOD, 0.0)
    upper = float(bound.upper)
    return {
        "clean": summary.clean,
        "certified": summary.certified[f"{epsilon:g}"],
        "upper": upper if upper < float("inf") else "inf",
        **text,
    }
