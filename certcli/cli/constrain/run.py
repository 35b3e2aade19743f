"""The work of `certvit constrain`: to an error, or to an agreement; and its report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from typing import Any

from torch import nn

from certcli.checkpoint.record import SEEN
from certcli.cli.constrain.command import Aim, preset_settings
from certcli.cli.shared import fidelity, groups
from certcli.cli.shared.output import Sink, percent
from certcli.constrain import network
from certcli.constrain.keep import ROUNDS, START, TRIALS, check_keep, constrain_keeping, usual_share
from certcli.constrain.layers import refusal
from certcli.constrain.settings import BETA, ConstrainSettings
from certcli.evaluation.fidelity import MANY_JUDGES, Fidelity, ReferenceLogits
from certcli.evaluation.image_doubts import kept_of
from certcli.images.calibration import hold_out
from certcli.images.labelled import at_once
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.network import bound_network
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system import errors, processes

CONVERGED = 0.01
"""A layer whose norm may lie more than this share above the least possible one is named."""
FIELDS = (
    *("kind", "before", "after", "error", "held_out_error", "eta", "iterations"),
    *("primal_residual", "gap", "feasible", "rank", "ridge", "seconds"),
)
"""Of a layer's result, in the report."""


def write_constrained(
    source: groups.Source,
    settings: ConstrainSettings,
    aim: Aim,
    data: groups.Calibration,
    machine: groups.BatchDevice,
    output: groups.Output,
    talk: groups.Talk,
) -> None:
    """Constrain the chosen layers, write the network, and report norms, bound and agreement."""
    sink = talk.sink()
    if aim.preset is not None:
        settings = preset_settings(aim, settings)
    elif settings.beta is not None:
        sink.note("beta sets the pace; --keep or --eta the strength")
    settings = replace(
        settings, eta=START if aim.eta is None else aim.eta, beta=settings.beta or BETA
    )
    if aim.keep is not None:
        check_keep(aim.keep)
    path = output.target("constrain", source.ckpt, source, data, aim)
    checkpoint = source.open(sink)
    record = checkpoint.record
    images = data.images(record, sink, judges=max(0, min(2 * data.limit, MANY_JUDGES)))
    keep = usual_share(images) if aim.keep is None else aim.keep
    model = build.load(checkpoint, machine.pick())
    paths, refused = _choose_layers(model, aim.layers)
    used, unseen = hold_out(images, limit=data.limit)
    memory = network.room_for(model, paths) if machine.pick().type == "cpu" else None
    if memory is not None:
        sink.note(f"statistics of {memory / 2**30:.1f} GiB at a time, the network is run for each")
    batch = at_once(machine.batch_size, record.input.size, machine.pick())
    calibration = network.LayerCalibration(
        model,
        paths,
        lambda: (pixels for _, pixels, _ in used.batches(batch)),
        (lambda: (pixels for _, pixels, _ in unseen.batches(batch))) if len(unseen) else None,
        memory,
        settings.tokens,
        team=processes.team(),
    )
    with calibration.watching():
        reference = fidelity.measure_reference(model, used, unseen, record, batch, sink)
    shape = (record.input.size, record.classes)
    before: Any = bound_network(model, *shape).upper if processes.team().leads else None
    if aim.eta is not None or aim.preset is not None:
        results, judged = _constrain_to_error(calibration, settings, sink), None
    else:
        results, judged = _constrain_to_agreement(calibration, settings, keep, reference, sink)
    if not processes.team().leads:
        return
    _remark_on_layers(results, sorted(set(paths) - calibration.called), refused, sink)
    bounds = bound_document(before, "upper_before"), bound_network(model, *shape).upper
    end_to_end = fidelity.fidelity_document(reference, model, record, not len(unseen), judged)
    end_to_end["chose"] = judged is not None
    parameters = {
        **asdict(settings),
        **asdict(aim),
        "keep": keep,
        "calibration": images.name,
        "images": min(len(images), data.limit),
        SEEN: kept_of(used),
    }
    if aim.eta is None:
        parameters["eta"] = max((result.eta for result in results), default=0.0)
    derived = checkpoint.derive(
        build.tensors_of(model, copy=False), "constrain", parameters, data.seed
    )
    output.write(derived.with_evidence("constrain", {"calibration": images.name}, end_to_end), path)
    sink.document(
        {
            "output": str(path),
            "kept": end_to_end,
            **bounds[0],
            **bound_document(bounds[1], "upper_after"),
            "clean_before": end_to_end["accuracy_before"],
            "clean_after": end_to_end["accuracy_after"],
            "layers": [
                {"path": _layer_name(r.path), **{name: getattr(r, name) for name in FIELDS}}
                for r in results
            ],
        }
    )
    fidelity.show_fidelity(end_to_end, sink)
    sink.text(f"network's bound: {before} -> {bounds[1]}")
    _show_norms(
        f"Norms (proven) before and after, prox {settings.prox}, beta {settings.beta:g}, "
        f"eta {parameters['eta']:.3g}",
        results,
        sink,
    )
    sink.text(f"wrote {path}")


def _constrain_to_error(
    calibration: network.LayerCalibration, settings: ConstrainSettings, sink: Sink
) -> list[Any]:
    """Constrain each layer to the output error of the settings."""
    results = []
    with sink.progress("constrain", total=len(calibration.paths)) as bar:
        for result in network.constrain_to(calibration, settings):
            results.append(result)
            bar.advance(remark=result.path)
    network.write(calibration.model, {r.path: r.weight for r in results})
    return results


def _constrain_to_agreement(
    calibration: network.LayerCalibration,
    settings: ConstrainSettings,
    share: float,
    reference: ReferenceLogits,
    sink: Sink,
) -> tuple[list[Any], Fidelity]:
    """Search the largest error at which this share of top-1 predictions is preserved.

    Returns:
        The layers' results, empty where no error is small enough; the measured fidelity.
    """
    with sink.progress("constrain", total=len(calibration.paths) * (TRIALS + ROUNDS)) as bar:
        outcome = constrain_keeping(
            calibration,
            settings,
            share,
            reference,
            lambda eta, path: bar.advance(remark=f"eta {eta:.3g}: {path}"),
        )
    if not outcome.results:
        message = f"no tried eta preserves {100 * share:g} % of the top-1 predictions"
        sink.warn(f"{message}: the network is unchanged")
    return list(outcome.results), outcome.fidelity


def _choose_layers(
    model: PixelModel, patterns: Sequence[str]
) -> tuple[list[str], Mapping[str, str]]:
    """Return the paths of the layers to constrain, and the chosen ones that cannot be, and why."""
    reasons = {
        name: refusal(module)
        for name, module in model.net.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
        and (not patterns or any(fnmatch(name, pattern) for pattern in patterns))
    }
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    paths = [f"net.{name}" if name else "net" for name in reasons if name not in refused]
    if not paths:
        raise errors.UsageError(
            "no layer is left to constrain", "see --layers; `certvit lipschitz --layers`"
        )
    return paths, refused


def _show_norms(title: str, results: Sequence[Any], sink: Sink) -> None:
    """Print a row for each layer; a gap below a tenth of a percent counts as none."""
    sink.table(
        title,
        ["layer", "before", "after", "error", "on others", "iterations", "gap"],
        [
            (
                _layer_name(r.path),
                f"{r.before:.4g}",
                f"{r.after:.4g}",
                percent(r.error) + ("" if r.feasible else " infeasible"),
                percent(r.held_out_error),
                str(r.iterations),
                "-" if r.gap is None else "< 0.1 %" if r.gap < 0.001 else percent(r.gap),
            )
            for r in results
        ],
    )


def _remark_on_layers(
    results: Sequence[Any], absent: Sequence[str], refused: Mapping[str, str], sink: Sink
) -> None:
    """Name layers that did not change, lack images, did not converge, or have a surrogate norm."""
    if absent:
        sink.warn(
            f"never called as a module, hence unchanged: {', '.join(map(_layer_name, absent))}"
        )
    for path, reason in refused.items():
        sink.warn(f"left as it is: {_layer_name(path)}: {reason}")
    remarks: dict[str, list[Any]] = {
        "fewer independent inputs than width in {}: more, or more varied, images help": [
            r for r in results if r.rank < r.inputs
        ],
        "stopped with the norm possibly over 1 % above the least in {}": [
            r for r in results if r.gap is not None and r.gap > CONVERGED
        ],
        "windows overlap in {}: the norm of the reshaped kernel was minimised; before and after "
        "are proven for the convolution itself": [r for r in results if r.surrogate],
    }
    for remark, layers in remarks.items():
        several = len(layers) > 1
        if layers:
            first = f"{_layer_name(layers[0].path)}{', ...' * several}"
            sink.note(remark.format(f"{len(layers)} layer{'s' * several} ({first})"))


def _layer_name(path: str) -> str:
    return path.removeprefix("net.")
