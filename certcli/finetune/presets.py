"""The papers' trainings by name: options of `certvit finetune`. This imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from certcli.system.errors import UsageError
from certcli.system.registry import one_of


@dataclass(frozen=True)
class TrainingPreset:
    """A paper's training.

    Attributes:
        options: fields of the command and their texts, as they are typed.
        source: the paper and its table.
        read_as: how the paper's rows are read where they leave a choice.
    """

    name: str
    options: Mapping[str, str]
    source: str
    read_as: str


_ADAM = {"optimiser": "adamw", "weight_decay": "0"}
_GLORO = (
    'We read warm-up as the rise of the learning rate, "LR Decay" as the last value of an '
    'exponential, "single" as a constant radius. Our power iteration continues from the step '
    "before in place of five iterations."
)
_LOCAL_LIP = (
    "As in the code of its authors, the rate is constant until the decay epoch and then decreases "
    "exponentially. Warm-up (epochs at radius 0) and schedule of the radius are one linear rise here. "
    "TinyImageNet's lambda_sparse and lambda_theta (0.01, 0.1) are left out: on digits they changed "
    "nothing beyond the intervals."
)
_CERTVIT = (
    'We take the scheduler\'s own numbers, and leave out "LR Decay" (5e-6). The next step is '
    "`certvit constrain --preset certvit-paper-tables`."
)
_CAUCHY = (
    "The paper gives neither SAM's radius (here 0.05, Foret et al.), the strength of ColorJitter "
    "(0.4, timm's), the batch, nor the weight decay (none here)."
)


def _share(epochs: int, of: int) -> str:
    return f"{epochs / of:.6g}"


def _gloro(data: str, radius: str, warmup: int, epochs: int, lr: str, last: str) -> TrainingPreset:
    options = {
        "loss": "gloro",
        "epsilon": radius,
        "ramp": "0",
        "epochs": str(epochs),
        "batch_size": "512",
        "lr": lr,
        "warmup": _share(warmup, epochs),
        "schedule": f"exponential:{last}",
    }
    return TrainingPreset(f"gloro-{data}", _ADAM | options, "CertViT, Table 7", _GLORO)


def _local_lip(
    data: str, radius: str, rise: int, decay: int, epochs: int, last: str = "5e-6", **others: str
) -> TrainingPreset:
    """rise: epochs in which the radius grows, warm-up included; others: in place of the options here."""
    options = {
        "loss": "local-lip",
        "epsilon": radius,
        "ramp": _share(rise, epochs),
        "epochs": str(epochs),
        "batch_size": "256",
        "lr": "1e-3",
        "warmup": "0",
        "schedule": f"exponential:{last}@{_share(decay, epochs)}",
        **others,
    }
    return TrainingPreset(f"local-lip-{data}", _ADAM | options, "CertViT, Table 8", _LOCAL_LIP)


def _certvit(data: str, epochs: int, lr: str, schedule: str) -> TrainingPreset:
    options = {
        "loss": "ce",
        "epochs": str(epochs),
        "batch_size": "512",
        "lr": lr,
        "warmup": "0",
        "schedule": schedule,
    }
    return TrainingPreset(f"certvit-{data}", _ADAM | options, "CertViT, Table 9", _CERTVIT)


def _cauchy(name: str, epochs: int) -> TrainingPreset:
    options = {
        "loss": "ce",
        "optimiser": "sgd",
        "weight_decay": "0",
        "sam": "0.05",
        "epochs": str(epochs),
        "lr": "0.1",
        "schedule": "one-cycle",
        "augment": "crop,flip,color-jitter:0.4",
    }
    return TrainingPreset(name, options, "Cauchy paper, section 5.1", _CAUCHY)


def _presets() -> Iterator[TrainingPreset]:
    yield _gloro("mnist", "1.74", 5, 500, "1e-3", "5e-6")
    yield _gloro("cifar10", "0.16", 15, 800, "1e-3", "5e-6")
    yield _gloro("cifar100", "0.16", 30, 800, "1e-3", "5e-6")
    yield _gloro("tinyimagenet", "0.16", 35, 500, "2.5e-4", "5e-7")
    yield _local_lip("mnist", "1.58", 150, 150, 300)
    yield _local_lip("cifar10", "0.1551", 205, 200, 300)
    yield _local_lip("cifar100", "0.1551", 420, 400, 800)
    tiny = {"batch_size": "128", "lr": "2.5e-4"}
    yield _local_lip("tinyimagenet", "0.16", 155, 150, 250, "5e-7", **tiny)
    yield _certvit("mnist", 100, "1e-3", "steps:0.2@0.5,0.6,0.7,0.8")
    yield _certvit("cifar10", 200, "1e-3", "cosine:1e-5")
    yield _certvit("cifar100", 200, "1e-3", "cosine:1e-5")
    yield _certvit("tinyimagenet", 200, "2.5e-4", "cosine:1e-5")
    yield _cauchy("cauchy", 150)
    yield _cauchy("cauchy-tiny", 300)


PRESETS = {preset.name: preset for preset in _presets()}


def options_of(name: str) -> Mapping[str, str]:
    """Return the options of a preset; UsageError for an unknown name."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'", one_of(name, PRESETS))
    return PRESETS[name].options
