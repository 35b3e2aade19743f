"""Local Lipschitz constants (CertViT, definition 1; SpecFormer, definition 4.2) of a small network,
before and after what the papers do to it.
"""

from collections.abc import Iterator

from benchmarks.tables.layout import SOUND, Column, Row, Table
from benchmarks.tables.small import BOUND

CONSTANTS = Table(
    "local-1",
    "Local Lipschitz constants: SpecFormer, definition 4.2; CertViT, definition 1",
    ("network", "method"),
    (
        Column("clean", "clean %: validation; constrained: held-out training images"),
        Column("norms", "mean spectral norm of W_q, W_k, W_v", "number"),
        BOUND,
        Column("local", "slope of the logits within 0.01, mean of four images", "number", SOUND),
    ),
    "The last column is proven: no two images within l2 0.01 of one of four test images (`certvit lipschitz --around "
    "0.01`) have logits that grow faster. The network is the smallest on which this takes seconds: one block of width "
    "16, five tokens, digits, 30 epochs; adversarial training is PGD-3 in l2 at 0.3. "
    "`constrain` acts on the plain network: by `--keep 0.98`, and by the paper's preset. Adversarial training divides "
    "the local constant by 2.7 and leaves the global bound; the penalty lowers the norms by up to a quarter and neither.",
    "one small network",
)

TABLES = (CONSTANTS,)

_INIT = (
    "certvit init certvit_vit_digits --arch-arg patch_size=4 --arch-arg embed_dim=16 --arch-arg num_heads=2 "
    "--arch-arg depth=1 --seed {seed} -o init.safetensors --force"
)
_TRAIN = (
    "certvit finetune init.safetensors --dataset digits --loss ce --optimiser adamw --lr 2e-3 --batch-size 64 "
    "--epochs 30{options} --seed {{seed}} -o net.safetensors --force"
)
_TRAINED = {
    "none": ("plain training", ""),
    "msvp-1e-3": ("MSVP, lambda 1e-3", " --msvp 1e-3"),
    "msvp-1e-2": ("MSVP, lambda 1e-2", " --msvp 1e-2"),
    "adversarial": (
        "adversarial training",
        " --adversarial pgd --attack-norm l2 --attack-epsilon 0.3 --attack-steps 3",
    ),
}
_CONSTRAINED = {
    "constrained": ("plain, then `constrain`", ""),
    "constrained-as-printed": (
        "plain, then `constrain --preset certvit-paper-tables`",
        " --preset certvit-paper-tables",
    ),
}
_JUDGED = {
    "norms": "python -m benchmarks.tables.norms net.safetensors",
    "bound": "certvit lipschitz net.safetensors --no-estimate --around 0.01 --dataset digits --limit 4",
}
_FIGURES = {
    "norms": "norms/norms",
    "upper": "bound/log10_upper",
    "local": "bound/around/images/*/logits_upper",
}


def rows() -> Iterator[Row]:
    root = "local-1/digits"
    network = "digits ViT, one block (ours)"
    for name, (label, options) in _TRAINED.items():
        steps = {"init": _INIT, "train": _TRAIN.format(options=options)} | _JUDGED
        figures = {"clean": "train/clean"} | _FIGURES
        yield Row(f"{root}/{name}", (network, label), steps, figures, (0, 1, 2), quick=True)
    for name, (label, options) in _CONSTRAINED.items():
        command = (
            f"certvit constrain {{{root}/none}}/net.safetensors --dataset digits --limit 100"
            f"{options} -o net.safetensors --force"
        )
        yield Row(
            f"{root}/{name}",
            (network, label),
            {"constrain": command} | _JUDGED,
            {"clean": "constrain/clean_after"} | _FIGURES,
            (0, 1, 2),
            after=(f"{root}/none",),
            quick=True,
        )
