"""The Cauchy paper's Tables 1 and 2: ViT against CoViT, AdamW against SAM, on small networks."""

from collections.abc import Iterator

from benchmarks.tables.layout import Column, Row, Table
from benchmarks.tables.small import BOUND, SMALL

CAUCHY = Table(
    "cauchy-1",
    "Cauchy paper, Table 1: ViT against CoViT",
    ("network", "optimiser"),
    (
        Column("clean", "clean %"),
        Column("pgd20", "PGD-20 (l2) %"),
        Column("cw", "CW (l2) %"),
        Column("sigma", "mean largest singular value of a block", "number"),
        BOUND,
    ),
    "The paper: CIFAR-10 at 224 x 224, 4 and 8 blocks of width 128, 300 epochs with SAM, PGD at l2 2. Ours: the "
    "small networks of SpecFormer's Table 1 with the mean over tokens, from random weights. Equal numbers of "
    "gradients: SAM takes two a step and gets half the epochs (but for one row). Digits: PGD at l2 0.5, step 0.05, "
    "and at linf 24/255. Singular values: 40 images, of which the paper's "
    "Figure 3 shows violins.",
)

LARGE = Table(
    "cauchy-2",
    "Cauchy paper, Table 2: larger networks",
    ("network",),
    (
        Column("clean", "clean %"),
        Column("fgsm", "FGSM %"),
        Column("pgd7", "PGD-7 (linf) %"),
        Column("pgd7l2", "PGD-7 (l2) %"),
        Column("cw", "CW (l2) %"),
        Column("hoelder", "(norm 1 x norm inf)^1/2", "number"),
    ),
    "The paper: width 512, 150 epochs with SAM. Ours: the same networks as in Table 1 above, with the attacks of the "
    "paper's Table 2 (digits: as there).",
)

TABLES = (CAUCHY, LARGE)


def rows() -> Iterator[Row]:
    pooled = " --arch-arg class_token=false --arch-arg global_pool=avg"
    shown = {
        "clean": "attack/clean",
        "pgd20": "attack/parts/1/attacks/pgd-20",
        "cw": "attack/parts/2/attacks/cw",
        "upper": "bound/log10_upper",
        "sigma": "blocks/jacobian/*/mean",
        "hoelder": "blocks/jacobian/*/hoelder_bound_mean",
        "fgsm": "attack/parts/0/attacks/fgsm",
        "pgd7": "attack/parts/0/attacks/pgd-7",
        "pgd7l2": "attack/parts/1/attacks/pgd-7",
    }
    columns = {name: where for name, where in shown.items() if "attack" not in where}
    columns |= {"clean": "linf/clean", "fgsm": "fgsm/attacks/fgsm", "pgd7": "linf/attacks/pgd-7"}
    columns |= {"pgd7l2": "l2/attacks/pgd-7", "pgd20": "l2/attacks/pgd-20"}
    for small in SMALL:
        for mixing in ("vit", "covit"):
            for optimiser, (tool, options) in _OPTIMISERS.items():
                commands = small.made(options, pooled, halved=optimiser == "sam")
                if mixing == "covit":
                    mixed = f"certvit adapt init.safetensors {small.images} --attention conv --norm keep --residual keep "
                    commands["train"] = commands["train"].replace(
                        "init.safetensors", "covit.safetensors"
                    )
                    commands = {
                        "init": commands["init"],
                        "mixing": mixed + "--epochs -1 --distill 0 -o covit.safetensors --force",
                        "train": commands["train"],
                    }
                label = small.label.replace("ViT", _LABEL[mixing])
                row = Row(
                    f"cauchy-1/{small.name}/{mixing}-{optimiser}",
                    (label, tool),
                    commands | small.judged_as_by_cauchy(),
                    columns if small.radius else shown,
                    small.seeds,
                    quick=small.quick,
                )
                yield row
                yield Row(
                    row.name.replace("cauchy-1", "cauchy-2"), (f"{label}, {tool}",), same=row.name
                )
    for group in (("t1", "t2"), ("t3", "t4")):
        for mixing in ("vit", "covit"):
            for size in group:
                yield Row(
                    f"cauchy-1/{mixing}-{size}",
                    (f"{_LABEL[mixing]}-{size.upper()}", "SAM with SGD"),
                    note=_UNKNOWN,
                )
    sizes = {"vit": "s1 s2 s3 s4 m1 m2 m3 l", "covit": "s1 s2 s3 s4 s5 m1 m2 m3 m4 m5 l1 l2"}
    for mixing, names in sizes.items():
        for size in names.split():
            yield Row(
                f"cauchy-2/{mixing}-{size}", (f"{_LABEL[mixing]}-{size.upper()}",), note=_WIDE
            )


_OPTIMISERS = {
    "adamw": ("AdamW", ""),
    "sam": ("SAM 0.05 with AdamW", " --sam 0.05"),
    "sam-steps": ("the same, as many steps as AdamW (twice the cost)", " --sam 0.05"),
}
_LABEL = {"vit": "ViT", "covit": "CoViT"}
_UNKNOWN = "300 epochs of a GPU"
_WIDE = "150 epochs of a GPU"
"""Of the networks of width 512."""
