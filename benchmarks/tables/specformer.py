"""SpecFormer's Tables 1 to 3 and 5: standard and adversarial training of small ViTs, cost, weights
of the penalty.
"""

from collections.abc import Iterator

from benchmarks.tables.layout import Column, Row, Table
from benchmarks.tables.small import BOUND, SMALL

ROBUST = (Column("clean", "clean %"), Column("fgsm", "FGSM %"), Column("pgd2", "PGD-2 %"))
NORMS = Column("norms", "mean spectral norm of W_q, W_k, W_v", "number")

STANDARD = Table(
    "specformer-1",
    "SpecFormer, Table 1: standard training",
    ("backbone", "method"),
    (*ROBUST, NORMS, BOUND),
    "The paper: CIFAR-10, linf 2/255, from ImageNet weights, 40 epochs. Ours: ViTs of two blocks (width 64) from "
    "random weights, AdamW: `certvit_vit_digits` on the bundled digits (8 x 8 pixels, 30 epochs, all 396 test "
    "images, linf 24/255: at 2/255 digits hardly suffer; chosen on validation images), five seeds; and one for "
    "CIFAR-10 (JPEG) at 2/255 (8 epochs of 10,000 images, 1,000 test images), three. No figure is comparable "
    "with the paper's, only the differences between rows of one backbone are.",
)

ADVERSARIAL = Table(
    "specformer-2",
    "SpecFormer, Table 2: adversarial training",
    ("backbone", "method"),
    (Column("clean", "clean %"), Column("cw20", "CW-20 %"), Column("pgd20", "PGD-20 %"), BOUND),
    "The paper: linf 8/255. Ours: Table 1's plain digits ViT, trained on PGD-10 at 24/255 for 8 epochs more, "
    "attacked at 24/255. ARD and PRM are those of Mo et al. 2022, whose training the paper takes over. Again only "
    "differences count.",
)

COST = Table(
    "specformer-3",
    "SpecFormer, Table 3: cost of a training step",
    ("method",),
    (
        Column("standard", "standard training, ViT = 1", "number"),
        Column("adversarial", "adversarial, ViT = 1", "number"),
    ),
    "Ratio of CPU time of a step, median of rounds.",
    "our code, on a CPU",
)

PENALTIES = Table(
    "specformer-5",
    "SpecFormer, Table 5: weights of the penalty",
    ("lambda of q, k, v",),
    (*ROBUST, BOUND),
    "Standard training of the digits ViT, as in Table 1 above. One seed but for the rows that Table 1 has.",
    "digits, one seed",
)

TABLES = (STANDARD, ADVERSARIAL, COST, PENALTIES)

_VARIANTS = {
    "none": ("ViT", ""),
    "msvp": ("SpecFormer, lambda 1e-4", " --msvp 1e-4"),
    "msvp-1e-3": ("SpecFormer, lambda 1e-3", " --msvp 1e-3"),
    "msvp-1e-2": ("SpecFormer, lambda 1e-2", " --msvp 1e-2"),
}
_SHOWN = {
    "clean": "attack/clean",
    "fgsm": "attack/attacks/fgsm",
    "pgd2": "attack/attacks/pgd-2",
    "upper": "bound/log10_upper",
}
_REPLACED = {
    "lipsformer": ("LipsFormer", "--attention scsa --norm center --residual weighted"),
    "l2former": ("L2Former", "--attention l2 --norm keep --residual keep"),
    "lnformer": ("LNFormer", "--attention lnorm --norm keep --residual keep"),
}


def rows() -> Iterator[Row]:
    for small in SMALL:
        root = f"specformer-1/{small.name}"
        for name, (label, options) in _VARIANTS.items():
            steps = small.made(options) | small.judged("specformer-standard")
            steps["norms"] = "python -m benchmarks.tables.norms net.safetensors"
            yield Row(
                f"{root}/{name}",
                (small.label, label),
                steps,
                _SHOWN | {"norms": "norms/norms"},
                small.seeds,
                quick=small.quick,
            )
        for name, (label, parts) in _REPLACED.items():
            commands = small.made()
            adapt = f"certvit adapt init.safetensors {small.images} {parts} --epochs 0 --distill 0 --limit 100 "
            steps = {
                "init": commands["init"],
                "adapt": adapt + "-o adapted.safetensors --force",
                "train": commands["train"].replace("init.safetensors", "adapted.safetensors"),
            } | small.judged("specformer-standard")
            yield Row(
                f"{root}/{name}",
                (small.label, label),
                steps,
                _SHOWN,
                small.seeds,
                quick=small.quick,
            )
    for backbone, label in (("vit-s", "ViT-S"), ("deit-ti", "DeiT-Ti"), ("convit-ti", "ConViT-Ti")):
        for method in ("LipsFormer", "L2Former", "LNFormer", "ViT", "SpecFormer"):
            for table in ("specformer-1", "specformer-2"):
                yield Row(f"{table}/{backbone}/{method.lower()}", (label, method))
    yield from _adversarial()
    for method, label in (
        *((name, label) for name, (label, _) in _REPLACED.items()),
        ("specformer", "SpecFormer"),
    ):
        yield Row(
            f"specformer-3/{method}",
            (label,),
            {"time": f"python -m benchmarks.tables.cost --method {method}"},
            {"standard": "time/standard", "adversarial": "time/adversarial"},
            quick=True,
        )
    digits = SMALL[0]
    shared = {
        "1e-4,1e-4,1e-4": "msvp",
        "1e-3,1e-3,1e-3": "msvp-1e-3",
        "1e-2,1e-2,1e-2": "msvp-1e-2",
    }
    for weight in _WEIGHTS:
        same = f"specformer-1/digits/{shared[weight]}" if weight in shared else ""
        steps = (
            {} if same else digits.made(f" --msvp {weight}") | digits.judged("specformer-standard")
        )
        yield Row(f"specformer-5/{weight}", (weight,), steps, _SHOWN, same=same)


def _adversarial() -> Iterator[Row]:
    attacked = "--adversarial pgd --attack-epsilon 24/255 --attack-steps 10"
    options = {
        "none": ("ViT", ""),
        "msvp": ("SpecFormer, lambda 1e-4", " --msvp 1e-4"),
        "ard-prm": ("ViT with ARD and PRM", " --ard-prm 1"),
    }
    start = "specformer-1/digits/none"
    for name, (label, extra) in options.items():
        yield Row(
            f"specformer-2/digits/{name}",
            (SMALL[0].label, label),
            {
                "train": f"certvit finetune {{{start}}}/net.safetensors --dataset digits --loss ce --optimiser adamw "
                f"--lr 1e-3 --epochs 8 --batch-size 64 {attacked}{extra} --seed {{seed}} -o net.safetensors --force",
            }
            | SMALL[0].judged("specformer-adversarial"),
            {
                "clean": "attack/clean",
                "cw20": "attack/attacks/cw-20",
                "pgd20": "attack/attacks/pgd-20",
                "upper": "bound/log10_upper",
            },
            (0, 1, 2),
            after=(start,),
            quick=True,
        )


_WEIGHTS = (
    "1e-4,0,0", "0,1e-4,0", "0,0,1e-4", "5e-4,7e-5,2e-4", "1e-4,1e-4,1e-4", "2e-4,5e-5,7e-5", "1e-3,9e-5,3e-4",
    "1e-3,1e-3,1e-3", "5e-4,3e-4,3e-4", "5e-5,3e-5,3e-5", "2e-3,3e-4,4e-4", "4e-3,8e-4,1e-3", "1e-2,1e-2,1e-2",
)  # fmt: skip
"""The paper's, and one that its text calls too large."""
