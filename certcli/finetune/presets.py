"""The papers' trainings by name: options of `certvit finetune`. This imports no torch.

Where they come from, and how we read what a paper leaves open: docs/finetune.md.
"""

from collections.abc import Mapping

from certcli.system.errors import UsageError
from certcli.system.registry import one_of

PRESETS: Mapping[str, str] = {
    "gloro-mnist": (
        "--optimiser adamw --weight-decay 0 --loss gloro --epsilon 1.74 --ramp 0 --epochs 500 "
        "--batch-size 512 --lr 1e-3 --warmup 0.01 --schedule exponential:5e-6"
    ),
    "gloro-cifar10": (
        "--optimiser adamw --weight-decay 0 --loss gloro --epsilon 0.16 --ramp 0 --epochs 800 "
        "--batch-size 512 --lr 1e-3 --warmup 0.01875 --schedule exponential:5e-6"
    ),
    "gloro-cifar100": (
        "--optimiser adamw --weight-decay 0 --loss gloro --epsilon 0.16 --ramp 0 --epochs 800 "
        "--batch-size 512 --lr 1e-3 --warmup 0.0375 --schedule exponential:5e-6"
    ),
    "gloro-tinyimagenet": (
        "--optimiser adamw --weight-decay 0 --loss gloro --epsilon 0.16 --ramp 0 --epochs 500 "
        "--batch-size 512 --lr 2.5e-4 --warmup 0.07 --schedule exponential:5e-7"
    ),
    "local-lip-mnist": (
        "--optimiser adamw --weight-decay 0 --loss local-lip --epsilon 1.58 --ramp 0.5 "
        "--epochs 300 --batch-size 256 --lr 1e-3 --warmup 0 --schedule exponential:5e-6@0.5"
    ),
    "local-lip-cifar10": (
        "--optimiser adamw --weight-decay 0 --loss local-lip --epsilon 0.1551 --ramp 0.683333 "
        "--epochs 300 --batch-size 256 --lr 1e-3 --warmup 0 --schedule "
        "exponential:5e-6@0.666667"
    ),
    "local-lip-cifar100": (
        "--optimiser adamw --weight-decay 0 --loss local-lip --epsilon 0.1551 --ramp 0.525 "
        "--epochs 800 --batch-size 256 --lr 1e-3 --warmup 0 --schedule exponential:5e-6@0.5"
    ),
    "local-lip-tinyimagenet": (
        "--optimiser adamw --weight-decay 0 --loss local-lip --epsilon 0.16 --ramp 0.62 "
        "--epochs 250 --batch-size 128 --lr 2.5e-4 --warmup 0 --schedule exponential:5e-7@0.6"
    ),
    "certvit-mnist": (
        "--optimiser adamw --weight-decay 0 --loss ce --epochs 100 --batch-size 512 --lr 1e-3 "
        "--warmup 0 --schedule steps:0.2@0.5,0.6,0.7,0.8"
    ),
    "certvit-cifar10": (
        "--optimiser adamw --weight-decay 0 --loss ce --epochs 200 --batch-size 512 --lr 1e-3 "
        "--warmup 0 --schedule cosine:1e-5"
    ),
    "certvit-cifar100": (
        "--optimiser adamw --weight-decay 0 --loss ce --epochs 200 --batch-size 512 --lr 1e-3 "
        "--warmup 0 --schedule cosine:1e-5"
    ),
    "certvit-tinyimagenet": (
        "--optimiser adamw --weight-decay 0 --loss ce --epochs 200 --batch-size 512 --lr "
        "2.5e-4 --warmup 0 --schedule cosine:1e-5"
    ),
    "cauchy": (
        "--loss ce --optimiser sgd --weight-decay 0 --sam 0.05 --epochs 150 --lr 0.1 "
        "--schedule one-cycle --augment crop,flip,color-jitter:0.4"
    ),
    "cauchy-tiny": (
        "--loss ce --optimiser sgd --weight-decay 0 --sam 0.05 --epochs 300 --lr 0.1 "
        "--schedule one-cycle --augment crop,flip,color-jitter:0.4"
    ),
    "specformer": (
        "--loss ce --msvp 1e-4 --optimiser sgd --lr 0.1 --weight-decay 1e-4 --schedule steps "
        "--warmup 0 --clip-grad 1 --epochs 40 --batch-size 64 --augment crop,flip"
    ),
    "specformer-adversarial": (
        "--loss ce --msvp 1e-4 --optimiser sgd --lr 0.1 --weight-decay 1e-4 --schedule steps "
        "--warmup 0 --clip-grad 1 --epochs 40 --batch-size 64 --augment crop,flip "
        "--adversarial pgd --attack-epsilon 8/255 --attack-steps 10"
    ),
}
"""By the name that --preset takes, as they are typed."""


def options_of_preset(name: str) -> Mapping[str, str]:
    """Return fields of the command and their texts; UsageError for an unknown name."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset '{name}'", one_of(name, PRESETS))
    words = PRESETS[name].split()
    names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
    return dict(zip(names, words[1::2], strict=True))
