"""Certified training for local certificates: its enclosure against the network's own values, slopes
and neighbours, what it refuses, and the epoch that it chooses.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certcli.checkpoint.file import Checkpoint
from certcli.finetune.loop import Trainer
from certcli.finetune.losses import forms
from certcli.finetune.losses.local import LocalEnclosure, local
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.validation import ENCLOSED_ENTRIES, Quality, Validation
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.blocks import FloorNorm, spread_of
from certcli.system.errors import ArchitectureError, UsageError
from tests.helpers.commands import certvit
from tests.helpers.training import digit_sets, trainer_of

SHAPES: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean of tokens": {"class_token": False, "global_pool": "avg"},
    "layer scale": {"init_values": 0.5},
    "register token": {"reg_tokens": 1, "no_embed_class": True},
    "norm with a floor": {"floor": 0.5},
}
COUNT = 6


def initialised_plain(arch: str = "certvit_vit_digits", **changes: Any) -> Checkpoint:
    shape = {"patch_size": 4, "embed_dim": 8, "num_heads": 2, "depth": 2, "mlp_ratio": 1.0}
    shape = {**shape, **changes} if arch == "certvit_vit_digits" else changes
    return build.initialise(arch, shape)


def curved_network(**changes: Any) -> PixelModel:
    """A network whose weights are large enough that everything in it is curved; `floor`: of norms."""
    floor = changes.pop("floor", None)
    model = build.load(initialised_plain(**changes), writable=True)
    if floor is not None:
        for path, norm in list(model.named_modules()):
            if isinstance(norm, nn.LayerNorm):
                model.set_submodule(path, FloorNorm(norm.weight.numel(), floor))
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.net.named_parameters():
            if "norm" not in name and "gamma" not in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def judged_images(model: PixelModel) -> tuple[Tensor, Tensor]:
    _, images_of = digit_sets(initialised_plain(), 1, COUNT)
    images = images_of.tensors()[0].double()
    return images, model(images).argmax(1)


def leads(model: PixelModel, images: Tensor, labels: Tensor) -> Tensor:
    logits = model(images)
    return logits.gather(1, labels[:, None]) - logits


def stretched_leads(model: PixelModel, images: Tensor, labels: Tensor) -> Tensor:
    """Return the margins times the length that the last norm divides by: what is enclosed."""
    by_token = model.net.global_pool == "token"
    norm = model.net.norm if by_token else model.net.fc_norm
    lengths = []

    def record(module: Any, arguments: Any) -> None:
        token = arguments[0][:, 0] if by_token else arguments[0]
        spread = spread_of(module)
        variance = token.var(-1, unbiased=False) + spread.eps
        lengths.append(variance.clamp_min(spread.min_variance).sqrt())

    hook = norm.register_forward_pre_hook(record)
    margins = leads(model, images, labels)
    hook.remove()
    return margins * lengths[0][:, None]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_a_small_ball_margins_fall_by_the_length_of_their_slopes(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "TINY", 1e-26)
    monkeypatch.setattr(forms, "NARROW", 1e-12)
    model = curved_network(**SHAPES[shape])
    images, labels = judged_images(model)
    enclosure = LocalEnclosure(model)
    radius = 1e-5
    everything = enclosure.directions(torch.Generator(), images[0].numel()).double()
    lower = enclosure.margins(images, labels, radius, everything)
    exact = leads(model, images, labels)
    length = stretched_leads(model, images, labels) / exact
    for number in range(COUNT):
        label = labels[number : number + 1]
        jacobian = torch.autograd.functional.jacobian(
            lambda x: stretched_leads(model, x[None], label)[0],  # noqa: B023
            images[number],
        )
        others = torch.arange(10) != label
        slopes = jacobian.flatten(1).norm(dim=1)[others]
        fallen = ((exact - lower) * length)[number, others] / radius
        # second order adds the radius times curvatures
        assert torch.allclose(fallen, slopes, rtol=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_with_all_terms_counted_no_neighbour_is_below_the_margins(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "SECOND_ORDER", 1.0)
    model = curved_network(**SHAPES[shape])
    images, labels = judged_images(model)
    enclosure = LocalEnclosure(model)
    generator = torch.Generator().manual_seed(2)
    everything = enclosure.directions(generator, images[0].numel()).double()
    length = stretched_leads(model, images, labels) / leads(model, images, labels)
    length = length.nan_to_num(1.0)  # 0 / 0 at the label
    for radius in (0.003, 0.01, 0.03):
        lower = enclosure.margins(images, labels, radius, everything) * length
        for _ in range(30):
            noise = torch.randn(images.shape, generator=generator).double()
            neighbours = images + radius * noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            assert (lower <= stretched_leads(model, neighbours, labels) + 1e-9).all()


def swapped_for_softmax(model: PixelModel) -> PixelModel:
    """A block that computes something else."""
    model.net.blocks[0].mlp.act = torch.nn.Softmax(-1)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        *({"qk_norm": True}, {"scale_attn_norm": True}, {"norm_layer": "rmsnorm"}),
        *({"global_pool": "max"}, {"pre_norm": True}, {"arch": "certvit_4c3f", "img_size": 8}, {}),
    ],
    ids=str,
)
def test_a_network_of_another_kind_is_refused_by_name(changes: dict[str, Any]) -> None:
    model = build.load(initialised_plain(**changes), writable=True)
    model = model if changes else swapped_for_softmax(model)
    with pytest.raises(ArchitectureError, match=f"this {type(model.net).__name__} is no vision"):
        LocalEnclosure(model)


def trainer_near(checkpoint: Checkpoint, **changes: Any) -> Trainer:
    return trainer_of(checkpoint, **{"batch_size": 64, "lr": 3e-3, "epsilon": 0.05, **changes})


def test_the_worst_logits_weigh_what_is_asked_and_have_a_gradient_where_they_explode() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 1])
    margins = torch.tensor([[0.0, -1.0]])
    plain = local(logits, labels, margins, 0.1, 0.0)
    worst = local(logits, labels, margins, 0.1, 1.0)
    assert plain == torch.nn.functional.cross_entropy(logits, labels)
    assert worst == pytest.approx(math.log1p(math.log1p(math.e)))
    assert local(logits, labels, margins, 0.1) == pytest.approx(float(0.6 * plain + 0.4 * worst))
    exploded = torch.tensor([[0.0, -2000.0]], requires_grad=True)
    local(logits, labels, exploded, 0.5).backward()
    assert float(exploded.grad[0, 1]) < 0
    for name, value in (("worst_weight", 0.2), ("enclosed", 4)):
        with pytest.raises(UsageError, match="has no meaning with --loss ce"):
            FinetuneSettings(loss="ce", **{name: value})


def test_a_run_for_local_certificates_is_judged_by_them_and_chooses_its_epoch_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clean accuracy is no measure here, neither of later epochs nor of those before."""
    checkpoint = initialised_plain(depth=1)
    shares = iter([0.4, 0.1])
    monkeypatch.setattr(
        "certcli.finetune.validation.evaluate", lambda *_, **__: Quality(0.95, None, None)
    )
    monkeypatch.setattr(Validation, "_enclosed_share", lambda self, enclosure, images: next(shares))
    run = trainer_near(checkpoint, loss="ce", enclosure_penalty=(0.1, 0.1, 0.1), epochs=4)
    epochs = list(run.run(*digit_sets(checkpoint, 256, 40)))
    # no share before the penalty has its weight
    assert [epoch.certified_estimate for epoch in epochs] == [None, None, 0.4, 0.1]
    assert run.best_epoch == 3


def test_the_share_is_of_margins_that_the_enclosure_leaves_positive() -> None:
    checkpoint = initialised_plain(depth=1)
    run = trainer_near(checkpoint, loss="local", epochs=3, epsilon=0.02)
    sets = digit_sets(checkpoint, 256, 40)
    *_, last = run.run(*sets)
    images, labels = sets[1].limit(32).tensors()
    enclosure = LocalEnclosure(run.model)
    every = enclosure.directions(torch.Generator(), 64)
    with torch.no_grad():
        lower = enclosure.margins(images.float(), labels, 0.02, every)
    count = int((lower.scatter(1, labels[:, None], 1.0) > 0).all(1).sum())
    assert last.certified_estimate == pytest.approx(count / 32)
    assert 0 < count < 32


def test_a_penalised_network_without_a_quick_enclosure_is_judged_by_clean_accuracy() -> None:
    """One of another kind; or of more tokens, where an estimate takes a minute and an epoch two
    seconds.
    """
    penalised = {"loss": "ce", "enclosure_penalty": (0.1, 0.1, 0.1), "epochs": 2}
    other = initialised_plain(qk_norm=True, depth=1)
    epochs = list(trainer_near(other, **penalised).run(*digit_sets(other, 256, 40)))
    assert all(epoch.certified_estimate is None for epoch in epochs)
    with pytest.raises(ArchitectureError, match="no enclosure for training"):
        trainer_near(other, loss="local", epochs=2)
    large, small = (initialised_plain(depth=1, embed_dim=width) for width in (64, 8))
    run = trainer_near(large, **penalised)
    assert LocalEnclosure(run.model).entries == ENCLOSED_ENTRIES + 64
    assert run.validation.enclosure is None
    assert trainer_near(large, loss="local", epochs=2).validation.enclosure is not None
    assert trainer_near(small, **penalised).validation.enclosure is not None


def test_the_command_names_the_proof_that_it_trained_for(workshop: Path, tmp_path: Path) -> None:
    plain = workshop / "plain.safetensors"
    out = tmp_path / "tight.safetensors"
    words = ("--dataset", "digits", "-e", 0.1, "--epochs", 1, "--limit", 20, "-o", out, "--force")
    for loss in (("--loss", "local"), ("--loss", "ce", "--enclosure-penalty", 0.1)):
        said = certvit("finetune", plain, *loss, *words).output
        assert f"certvit certify {out} --dataset digits --method local -e 0.1" in " ".join(
            said.split()
        )
    assert "--method local" not in certvit("finetune", plain, "--loss", "ce", *words).output
