"""CertViT's Table 1 on the paper's own networks, as its parameter counts decode: every method for
as many CPU seconds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.tables.convolutional import CHAIN, DATA, Data, figures, judged
from benchmarks.tables.layout import Row

_NAMES = {
    "standard": "standard",
    "bcp": "BCP",
    "gloro": "GloRo",
    "local-lip": "Local-Lip",
    "certvit": "CertViT",
}
_ADAMW = "--optimiser adamw --lr 1e-3 --weight-decay 0 --batch-size"
_FLOORS = "--goal keep --limit 400"
"""Of the ViTs, whose blocks `adapt` cannot replace: floors under LayerNorm, 10^18 where it was 10^47."""


@dataclass(frozen=True)
class Recipe:
    """How one network is trained, each method for some 180 CPU seconds.

    options: method -> its loss and those of its training, the number of optimiser steps among them.
    pretraining: of CertViT, inside its 180 seconds.
    parts: of a ViT, options of `certvit adapt` before certified training.
    images: certified by the global bound, by a chain's, and attacked.
    """

    data: str
    net: str
    options: Mapping[str, str]
    pretraining: str
    parts: str = ""
    images: tuple[int, int, int] = (1000, 200, 200)


RECIPES = (
    Recipe(
        "mnist",
        "4c3f",
        {
            "standard": f"--loss ce {_ADAMW} 128 --steps 1000",
            "bcp": f"--loss bcp -e 1.58 {_ADAMW} 32 --ramp 0.5 --validation-limit 300 --steps 500",
            "gloro": f"--loss gloro -e 1.58 {_ADAMW} 128 --ramp 0.5 --steps 950",
            "local-lip": f"--loss local-lip-gloro -e 1.58 {_ADAMW} 32 --ramp 0.5 --validation-limit 300 --steps 430",
            "certvit": "--loss margin -e 1.58 --batch-size 128 --augment warp --steps 300",
        },
        f"{_ADAMW} 128 --steps 150",
    ),
    Recipe(
        "cifar10",
        "4c3f",
        {
            "standard": f"--loss ce {_ADAMW} 64 --steps 750",
            "bcp": f"--loss bcp -e 36/255 {_ADAMW} 32 --ramp 0.5 --validation-limit 300 --steps 360",
            "gloro": f"--loss gloro -e 36/255 {_ADAMW} 64 --ramp 0.5 --steps 700",
            "local-lip": f"--loss local-lip -e 36/255 {_ADAMW} 32 --ramp 0.5 --validation-limit 300 --steps 280",
            "certvit": f"--loss margin -e 36/255 {_ADAMW} 64 --steps 380",
        },
        f"{_ADAMW} 64 --steps 150",
    ),
    Recipe(
        "mnist",
        "vit",
        {
            "standard": f"--loss ce {_ADAMW} 64 --validation-limit 300 --steps 750",
            "gloro": f"--loss gloro -e 1.58 {_ADAMW} 64 --validation-limit 300 --steps 300",
            "certvit": f"--loss margin -e 1.58 {_ADAMW} 64 --validation-limit 300 --steps 250",
        },
        f"{_ADAMW} 64 --validation-limit 300 --steps 150",
        _FLOORS,
    ),
    Recipe(
        "cifar10",
        "vit",
        {
            "standard": f"--loss ce {_ADAMW} 32 --validation-limit 200 --steps 230",
            "gloro": f"--loss gloro -e 36/255 {_ADAMW} 32 --validation-limit 200 --steps 110",
            "certvit": f"--loss margin -e 36/255 {_ADAMW} 32 --validation-limit 200 --steps 90",
        },
        f"{_ADAMW} 32 --validation-limit 200 --steps 50",
        _FLOORS,
        (200, 0, 100),
    ),
)


def rows() -> Iterator[Row]:
    for recipe in RECIPES:
        data = next(data for data in DATA if data.name == recipe.data)
        for method in recipe.options:
            yield _row(recipe, data, method)


def _row(recipe: Recipe, data: Data, method: str) -> Row:
    """One method on one network: its training, its certificate, and the attack beside it."""
    arch = f"certvit_{'l2_' if recipe.net == 'vit' else ''}{recipe.net}_{recipe.data}"
    stages = [*_before(recipe, data, method), ("train", _finetune(data, recipe.options[method]))]
    steps = {"init": f"certvit init {arch} --seed {{seed}} -o init.safetensors --force"}
    source = "init"
    for name, command in stages:
        result = "net" if name == "train" else name
        verb, _, rest = command.partition(" ")
        steps[name] = f"certvit {verb} {source}.safetensors {rest} -o {result}.safetensors --force"
        source = result
    chain = method in CHAIN
    globally, locally, attacked = recipe.images
    certify = f" --limit {locally if chain else globally}"
    how = f" --method {method}" if chain else ""
    judging = judged(data.test, data.radius, (certify, f" --limit {attacked}"), how)
    shown = figures(data.shown) | {"training": "cpu_seconds/training"}
    return Row(
        f"certvit-1/{recipe.data}/{recipe.net}-decoded/{method}",
        (data.title, f"{recipe.net.upper().replace('VIT', 'ViT')}, decoded", _NAMES[method]),
        steps | judging,
        shown | ({"upper": "train/log10_upper"} if chain else {}),
        note=f"certified by {method} itself" if chain else "",
        paper=f"certvit-1/{recipe.data}/{recipe.net}/{method}",
    )


def _before(recipe: Recipe, data: Data, method: str) -> Iterator[tuple[str, str]]:
    """Yield what comes before a method's own training: CertViT's network and its constraints, and
    parts with a bound for a ViT.
    """
    if method == "certvit":
        yield "pretrain", _finetune(data, f"--loss ce {recipe.pretraining}")
    if recipe.parts and method != "standard":
        yield "adapt", f"adapt {data.images} {recipe.parts}"
    if method == "certvit":
        # a ViT's layers by the default map, a CNN's by the paper's, as in the rows above
        paper = "" if recipe.parts else " --prox l1 --eta 0.1 --relaxation 1.2"
        yield "constrain", f"constrain {data.images} --beta 0.01{paper}"


def _finetune(data: Data, options: str) -> str:
    validation = "" if "--validation-limit" in options else " --validation-limit 1000"
    return f"finetune {data.images} {options}{validation} --seed {{seed}}"
