"""The papers' trainings by name: options of `certvit finetune`. This imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from certcli.system.errors import UsageError
from certcli.system.registry import one_of


@dataclass(frozen=True)
class PaperTable:
    """Where a paper says how it trains, and how its rows are read where they leave a choice."""

    source: str
    read_as: str


@dataclass(frozen=True)
class TrainingPreset:
    """A paper's training: options as they are typed, and where they come from."""

    typed: str
    table: PaperTable

    @property
    def options(self) -> Mapping[str, str]:
        """Return fields of the command and their texts."""
        words = self.typed.split()
        names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
        return dict(zip(names, words[1::2], strict=True))


_GLORO = PaperTable(
    "CertViT, Table 7",
    'We read warm-up as the rise of the learning rate, "LR Decay" as the last value of an '
    'exponential, "single" as a constant radius. Our power iteration continues from the '
    "step before in place of five iterations.",
)
_LOCAL_LIP = PaperTable(
    "CertViT, Table 8",
    "As in the code of its authors, the rate is constant until the decay epoch and then "
    "decreases exponentially. Warm-up (epochs at radius 0) and schedule of the radius are "
    "one linear rise here. TinyImageNet's lambda_sparse and lambda_theta (0.01, 0.1) are "
    "left out: on digits they changed nothing beyond the intervals.",
)
_CERTVIT = PaperTable(
    "CertViT, Table 9",
    'We take the scheduler\'s own numbers, and leave out "LR Decay" (5e-6). The next step is'
    " `certvit constrain --preset certvit-paper-tables`.",
)
_CAUCHY = PaperTable(
    "Cauchy paper, section 5.1",
    "The paper gives neither SAM's radius (here 0.05, Foret et al.), the strength of "
    "ColorJitter (0.4, timm's), the batch, nor the weight decay (none here).",
)
_SPECFORMER = PaperTable(
    "SpecFormer, section 6.1",
    "The paper gives optimiser, rate, weight decay and epochs; what else there is follows Mo et al. "
    "Its Mixup and CutMix are left out. The weight 1e-4 for query, key and value is a row of its "
    "Table 5.",
)

PRESETS: Mapping[str, TrainingPreset] = {
    "gloro-mnist": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss gloro --epsilon 1.74 --ramp 0 "
        "--epochs 500 --batch-size 512 --lr 1e-3 --warmup 0.01 --schedule exponential:5e-6",
        _GLORO,
    ),
    "gloro-cifar10": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss gloro --epsilon 0.16 --ramp 0 "
        "--epochs 800 --batch-size 512 --lr 1e-3 --warmup 0.01875 "
        "--schedule exponential:5e-6",
        _GLORO,
    ),
    "gloro-cifar100": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss gloro --epsilon 0.16 --ramp 0 "
        "--epochs 800 --batch-size 512 --lr 1e-3 --warmup 0.0375 --schedule exponential:5e-6",
        _GLORO,
    ),
    "gloro-tinyimagenet": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss gloro --epsilon 0.16 --ramp 0 "
        "--epochs 500 --batch-size 512 --lr 2.5e-4 --warmup 0.07 --schedule exponential:5e-7",
        _GLORO,
    ),
    "local-lip-mnist": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss local-lip --epsilon 1.58 --ramp 0.5 "
        "--epochs 300 --batch-size 256 --lr 1e-3 --warmup 0 --schedule exponential:5e-6@0.5",
        _LOCAL_LIP,
    ),
    "local-lip-cifar10": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss local-lip --epsilon 0.1551 "
        "--ramp 0.683333 --epochs 300 --batch-size 256 --lr 1e-3 --warmup 0 "
        "--schedule exponential:5e-6@0.666667",
        _LOCAL_LIP,
    ),
    "local-lip-cifar100": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss local-lip --epsilon 0.1551 --ramp 0.525 "
        "--epochs 800 --batch-size 256 --lr 1e-3 --warmup 0 --schedule exponential:5e-6@0.5",
        _LOCAL_LIP,
    ),
    "local-lip-tinyimagenet": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss local-lip --epsilon 0.16 --ramp 0.62 "
        "--epochs 250 --batch-size 128 --lr 2.5e-4 --warmup 0 "
        "--schedule exponential:5e-7@0.6",
        _LOCAL_LIP,
    ),
    "certvit-mnist": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss ce --epochs 100 --batch-size 512 "
        "--lr 1e-3 --warmup 0 --schedule steps:0.2@0.5,0.6,0.7,0.8",
        _CERTVIT,
    ),
    "certvit-cifar10": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss ce --epochs 200 --batch-size 512 "
        "--lr 1e-3 --warmup 0 --schedule cosine:1e-5",
        _CERTVIT,
    ),
    "certvit-cifar100": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss ce --epochs 200 --batch-size 512 "
        "--lr 1e-3 --warmup 0 --schedule cosine:1e-5",
        _CERTVIT,
    ),
    "certvit-tinyimagenet": TrainingPreset(
        "--optimiser adamw --weight-decay 0 --loss ce --epochs 200 --batch-size 512 "
        "--lr 2.5e-4 --warmup 0 --schedule cosine:1e-5",
        _CERTVIT,
    ),
    "cauchy": TrainingPreset(
        "--loss ce --optimiser sgd --weight-decay 0 --sam 0.05 --epochs 150 --lr 0.1 "
        "--schedule one-cycle --augment crop,flip,color-jitter:0.4",
        _CAUCHY,
    ),
    "cauchy-tiny": TrainingPreset(
        "--loss ce --optimiser sgd --weight-decay 0 --sam 0.05 --epochs 300 --lr 0.1 "
        "--schedule one-cycle --augment crop,flip,color-jitter:0.4",
        _CAUCHY,
    ),
    "specformer": TrainingPreset(
        "--loss ce --msvp 1e-4 --optimiser sgd --lr 0.1 --weight-decay 1e-4 --schedule steps "
        "--warmup 0 --clip-grad 1 --epochs 40 --batch-size 64 --augment crop,flip",
        _SPECFORMER,
    ),
    "specformer-adversarial": TrainingPreset(
        "--loss ce --msvp 1e-4 --optimiser sgd --lr 0.1 --weight-decay 1e-4 --schedule steps "
        "--warmup 0 --clip-grad 1 --epochs 40 --batch-size 64 --augment crop,flip "
        "--adversarial pgd --attack-epsilon 8/255 --attack-steps 10",
        _SPECFORMER,
    ),
}
"""By the name that --preset takes."""


def options_of_preset(name: str) -> Mapping[str, str]:
    """Return the options of a preset; UsageError for an unknown name."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'", one_of(name, PRESETS))
    return PRESETS[name].options
