"""Each option of training does what its source says, changes the run, and is gone on with bit for
bit.
"""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from certcli.checkpoint.file import Checkpoint
from certcli.finetune.loop import Trainer
from certcli.finetune.objective import Teacher
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.state import load_training_state, save_training_state
from certcli.finetune.step import Average, Diverged, climbed
from certcli.finetune.stiefel import polar_factor
from certcli.images import datasets
from certcli.models import build
from certcli.system.errors import ArchitectureError, DataError, UsageError
from tests.helpers.training import LIPSCHITZ, digit_sets, trainer_of
from tests.helpers.workshop import TINY

Sets = list[datasets.Images]


def initialised(arch: str, arguments: dict, seed: int = 0) -> Checkpoint:
    return build.initialise(arch, arguments, seed=seed)


@pytest.fixture(scope="module")
def lipschitz() -> Checkpoint:
    return initialised("certvit_lip_digits", LIPSCHITZ)


def taught_by(teacher: Checkpoint, student: Checkpoint, classes: tuple[str, ...] = ()) -> Teacher:
    return Teacher(build.load(teacher), teacher.record, student.record, classes)


def trainer(checkpoint: Checkpoint, teacher: bool = False, **options: object) -> Trainer:
    plain = {"loss": "ce", "epochs": 2, "batch_size": 32, "lr": 0.01}
    taught = None
    if teacher:
        taught = taught_by(
            initialised(checkpoint.record.arch, dict(checkpoint.record.arch_args), seed=1),
            checkpoint,
        )
    return trainer_of(checkpoint, taught, **{**plain, **options})


@pytest.fixture(scope="module")
def sets(lipschitz: Checkpoint) -> Sets:
    return digit_sets(lipschitz, 96, 40)


MASKED = {"attack_norm": "l2", "attack_epsilon": 0.5, "attack_steps": 2, "ard_prm": 1.0}
MOVED = {"augment": ("shift",), "teacher": True}

OPTIONS: dict[str, dict] = {
    "msvp": {"msvp": (0.1, 0.1, 0.1)},
    "enclosure penalty": {"enclosure_penalty": (0.3, 0.009, 0.9)},
    "an attack that grows": {"adversarial": "pgd", "attack_norm": "l2", "attack_ramp": 1.0},
    "sam": {"sam": 0.1},
    "average": {"ema": 0.9},
    "augmentation": {"augment": ("crop", "flip", "shift")},
    "bands": {"augment": ("bands:1",)},
    "bands or greedy cutout, attacked": {
        "augment": ("bands:1", "cutout-greedy:2x4"),
        "adversarial": "pgd",
        "attack_epsilon": 0.1,
        "attack_steps": 1,
    },
    "teacher": {"teacher": True},
    "bfloat16": {"precision": "bf16"},
    "fgsm": {"adversarial": "fgsm", "attack_epsilon": 0.1},
    "pgd with ARD and PRM": {"adversarial": "pgd", **MASKED},
    "clipping": {"clip_grad": 0.1},
    "steps": {"schedule": "steps", "steps": 5},
    "one-cycle": {"schedule": "one-cycle"},
    "a cosine to a rate": {"schedule": "cosine:1e-3"},
    "steps at places": {"schedule": "steps:0.2@0.5,0.6"},
    "exponential": {"schedule": "exponential:1e-3@0.5"},
    "color jitter": {"augment": ("color-jitter:0.4",)},
    "dropout": {},
    "local": {"loss": "local", "epsilon": 0.05},
    "everything": {
        "adversarial": "pgd",
        "msvp": (0.1, 0.0, 0.1),
        "sam": 0.1,
        "ema": 0.9,
        **MOVED,
        **MASKED,
    },
}


def resumed(
    checkpoint: Checkpoint, sets: Sets, path: Path, **options: object
) -> tuple[Trainer, Trainer]:
    """Return a whole run of two epochs, and one that resumed after the first to the same losses."""
    whole = trainer(checkpoint, **options)
    second = trainer(checkpoint, **options)
    stream = whole.run(*sets)
    next(stream)
    save_training_state(path, whole.state())
    rest = [record.loss for record in stream]
    second.restore(load_training_state(path, "test"))
    assert [record.loss for record in second.run(*sets)] == rest
    return whole, second


@pytest.fixture(scope="module")
def without_options(sets: Sets) -> dict[str, Tensor]:
    """The last weights of a run without any option."""
    run = trainer(initialised("certvit_vit_digits", TINY))
    list(run.run(*sets))
    return run.last_net()


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_changes_the_run_and_resumes_bit_for_bit(
    name: str, sets: Sets, without_options: dict[str, Tensor], tmp_path: Path
) -> None:
    start = initialised(
        "certvit_vit_digits", {**TINY, "proj_drop_rate": 0.2} if name == "dropout" else TINY
    )
    whole, second = resumed(start, sets, tmp_path / "s.safetensors", **OPTIONS[name])
    last = whole.last_net()
    again = second.last_net()
    assert any(not torch.equal(value, last[key]) for key, value in without_options.items())
    assert all(torch.equal(value, again[key]) for key, value in last.items())


@pytest.mark.parametrize("options", [{}, {"sam": 0.1}, {"ema": 0.9}], ids=str)
def test_options_beside_a_bound_and_orthogonal_matrices(
    options: dict, lipschitz: Checkpoint, sets: Sets, tmp_path: Path
) -> None:
    common = {"loss": "margin", "optimiser": "stiefel", **options}
    whole, second = resumed(lipschitz, sets, tmp_path / "s.safetensors", **common)
    last = whole.last_net()
    again = second.last_net()
    assert last.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in last.items())
    orthogonal = set(map(id, whole.orthogonal))
    for name, parameter in whole.model.net.named_parameters():
        if id(parameter) in orthogonal:
            size = torch.linalg.matrix_norm(last[name].flatten(1).double(), 2)
            # float32 retraction: the estimate takes this norm for 1
            assert abs(float(size) - 1) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_precisions_on_a_gpu(precision: str, lipschitz: Checkpoint, sets: Sets) -> None:
    settings = FinetuneSettings(
        optimiser="stiefel", epochs=3, batch_size=32, lr=0.01, precision=precision
    )
    run = Trainer(build.load(lipschitz, "cuda", writable=True), settings, 10, "test")
    records = list(run.run(*sets))
    assert records[-1].loss < records[0].loss
    run.restore(run.state())


def test_sam_climbs_by_rho_and_comes_back_exactly() -> None:
    torch.manual_seed(0)
    weights = [
        nn.Parameter(torch.randn(4, 3)),
        nn.Parameter(torch.randn(5)),
        nn.Parameter(torch.randn(2)),
    ]
    (weights[0].square().sum() + weights[1].sum()).backward()
    before = [w.detach().clone() for w in weights]
    with climbed(weights, 0.3):
        moves = [w.detach() - b for w, b in zip(weights, before, strict=True)]
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))
    assert float(moves[2].norm()) == 0  # no gradient, no move
    length = torch.cat([move.flatten() for move in moves]).norm()
    assert torch.allclose(length, torch.tensor(0.3), rtol=1e-5)
    assert all(float((m * w.grad).sum()) > 0 for m, w in zip(moves[:2], weights[:2], strict=True))


def test_the_average_is_the_formula_and_is_retracted_in_use_only() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 6, bias=False)
    first = polar_factor(torch.randn(6, 6))
    second = polar_factor(torch.randn(6, 6))
    with torch.no_grad():
        net.weight.copy_(first)
    average = Average(net, 0.5)
    with torch.no_grad():
        net.weight.copy_(second)
    average.update_parameters(net)
    decay = min(0.5, 2 / 11)
    weight = average.module.weight
    assert torch.allclose(weight, decay * first + (1 - decay) * second, atol=1e-6)
    stored = weight.clone()
    with average.applied(net, [net.weight]):
        assert torch.allclose(
            net.weight @ net.weight.T, torch.eye(6), atol=1e-5
        )  # float32 Newton-Schulz
    assert torch.equal(net.weight, second)
    assert torch.equal(weight, stored)


def test_a_teacher_of_other_sizes_sees_the_images_resized(tiny: Checkpoint, sets: Sets) -> None:
    larger = initialised("certvit_vit_cifar10", {"depth": 1, "embed_dim": 24, "num_heads": 3})
    teacher = taught_by(larger, tiny)
    images = sets[0].fetch(range(4))
    assert teacher.note == "images of size 1x8x8 were resized to 3x32x32"
    wide = interpolate(images, (32, 32), mode="bilinear", antialias=True).repeat(1, 3, 1, 1)
    torch.testing.assert_close(teacher(images), build.load(larger)(wide))
    run = Trainer(
        build.load(tiny, writable=True), FinetuneSettings(loss="ce", epochs=1), 10, "x", teacher
    )
    assert list(run.run(*sets))


def test_a_teacher_of_imagenet_teaches_the_classes_that_folders_name(
    tiny: Checkpoint, sets: Sets
) -> None:
    arguments = dict(tiny.record.arch_args)
    imagenet = initialised("certvit_vit_digits", {**arguments, "num_classes": 1000})
    synsets = (
        "n01440764",
        "n03888257",
        *(f"n01{number}" for number in (443537, 484850, 491361, 494475)),
    )
    student = initialised("certvit_vit_digits", {**arguments, "num_classes": 6})
    teacher = taught_by(imagenet, student, synsets)
    images = sets[0].fetch(range(4))
    assert teacher.note == "6 of its 1,000 classes count"
    expected = build.load(imagenet)(images)[:, [0, 701, 1, 2, 3, 4]]
    torch.testing.assert_close(teacher(images), expected)


def test_teachers_of_another_task_are_refused(tiny: Checkpoint) -> None:
    arguments = dict(tiny.record.arch_args)
    seven = initialised("certvit_vit_digits", {**arguments, "num_classes": 7})
    imagenet = initialised("certvit_vit_digits", {**arguments, "num_classes": 1000})
    two, three = (
        initialised("certvit_vit_digits", {**arguments, "in_chans": channels})
        for channels in (2, 3)
    )
    names = tuple(map(str, range(10)))
    for teacher, student, classes, match in (
        (seven, tiny, names, "7 classes"),
        (imagenet, tiny, names, "1000 classes"),
        (imagenet, tiny, ("n01440764",), "1000 classes"),
        (two, three, names, "2 channels"),
    ):
        with pytest.raises(ArchitectureError, match=match):
            taught_by(teacher, student, classes)


@pytest.mark.parametrize(
    ("arch", "options", "match"),
    [
        ("certvit_lip_digits", {"adversarial": "pgd", "ard_prm": 0.5}, "patch embedding"),
        ("certvit_lip_digits", {"augment": ("bands:99",)}, "bands of 99 columns"),
        ("certvit_lip_digits", {"augment": ("cutout-greedy:1x8",)}, "leave nothing"),
    ],
)
def test_options_that_this_network_or_machine_lacks(arch: str, options: dict, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        trainer(initialised(arch, LIPSCHITZ), **options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "magic"},
        {"optimiser": "magic"},
        {"epochs": 0},
        {"lr": 0.0},
        {"lr": math.nan},
        {"epsilon": -1.0},
        {"augment": ("rotate",)},
        {"augment": ("bands:0",)},
        {"augment": ("cutout-greedy:3x4",)},
        {"augment": ("bands:2",), "loss": "bcp"},
        {"augment": ("bands:1",), "loss": "local"},
        {"augment": ("color-jitter",)},
        {"augment": ("color-jitter:0",)},
        {"augment": ("color-jitter:2",)},
        {"augment": ("color-jitter:0.4x0.4",)},
        {"augment": ("cutout",)},
        {"augment": ("cutout:2",)},
        {"augment": ("cutout:0x3",)},
        {"augment": ("cutout:2x0",)},
        {"precision": "fp8"},
        {"ard_prm": 0.5},
        {"adversarial": "pgd", "noise": 0.1},
        {"adversarial": "pgd", "attack_norm": "l1"},
        {"ema": 1.0},
        {"msvp": (1.0, -1.0, 0.0)},
        {"msvp": (1.0, math.nan, 0.0)},
        {"enclosure_penalty": (1.0, -1.0, 0.0)},
        {"enclosure_penalty": (math.nan, 1.0, 1.0)},
        {"attack_ramp": 2.0},
        {"schedule": "linear"},
        {"steps": 0},
    ],
    ids=str,
)
def test_options_out_of_range_or_against_each_other(wrong: dict) -> None:
    with pytest.raises(UsageError):
        FinetuneSettings(**wrong)


def test_the_lineage_names_what_is_on() -> None:
    usual = FinetuneSettings().parameters().keys()
    assert usual <= {field.name for field in fields(FinetuneSettings)}
    assert not {"sam", "adversarial", "attack_epsilon", "steps", "seed", "ema", "teacher"} & usual
    on = FinetuneSettings(loss="ce", adversarial="pgd", ema=0.5, steps=7).parameters().keys()
    assert {"adversarial", "attack_epsilon", "ard_prm", "ema", "steps"} <= on
    assert "epochs" not in on


def test_labels_outside_the_classes(tiny: Checkpoint, sets: Sets) -> None:
    for wrong, named in ((10, "label 10"), (-1, "label -1")):
        labels = sets[0].labels.clone()
        labels[3] = wrong
        with pytest.raises(DataError, match=named):
            list(trainer(tiny).run(replace(sets[0], labels=labels), sets[1]))


def test_weights_that_become_nan_are_never_kept(tiny: Checkpoint, sets: Sets) -> None:
    """The loss of the last step may be finite and its gradient not: the epoch's weights are looked
    at before they count.
    """
    run = trainer(tiny, epochs=1)
    step = run.descent.step

    def spoiled(*arguments: object) -> float:
        loss = step(*arguments)  # type: ignore[arg-type]
        with torch.no_grad():
            next(run.model.net.parameters()).fill_(torch.nan)
        return loss

    run.descent.step = spoiled  # type: ignore[method-assign, assignment]
    with pytest.raises(Diverged, match="became NaN"):
        list(run.run(sets[0].limit(32), sets[1]))
    assert all(bool(torch.isfinite(value).all()) for value in run.best_net.values())
