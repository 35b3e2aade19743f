"""CertViT's columns of FLOPs, decoded: into the epochs that they make, beside those that its Tables 7
to 10 print.
"""

from collections.abc import Iterator

from benchmarks.tables.layout import COUNTED, Column, Row, Table
from benchmarks.tables.pretrained import MODELS

SMALL = Table(
    "certvit-1f",
    "CertViT, Table 1: FLOPs, as epochs",
    ("data", "network", "method", "printed, 10^13"),
    (Column("epochs", "epochs that the printed FLOPs make", "number", COUNTED),),
    "The unit decoded: multiply-adds of convolutions and linear maps (attention's products of tokens not counted) "
    "of one forward pass, times 50,000 images (for MNIST and TinyImageNet too, which have 60,000 and 100,000), times "
    "epochs. The paper's epochs: its Tables 7 (GloRo), 8 (Local-Lip) and 9 (standard). Refuted: the FLOPs are of "
    "other epochs than the table prints, so the paper contradicts itself. For BCP and CertViT it prints none.",
)

LARGE = Table(
    "certvit-10",
    "CertViT, Table 10: constraining, as typed",
    ("model", "command"),
    (
        Column("epochs", "epochs that the printed L2 FLOPs make", "number", COUNTED),
        Column("ratio", "printed CertViT FLOPs over L2 FLOPs", "number"),
    ),
    "The command runs ten iterations (the paper: 5 to 7 epochs of 2 or 3 projections). Table 2's FLOPs in the same "
    "unit: linear maps and patch embedding with queries and keys tied, times 1,281,167 images. The paper's epochs: "
    "those of Table 10. Refuted: its FLOPs are of other epochs, 50 for nearly every model.",
)

TABLES = (SMALL, LARGE)

_SHAPES = {"mnist": "1x28x28", "tinyimagenet": "3x64x64"}
_NETWORKS = {
    "mnist/4c3f": (6.1, 18.2, 30.3, 17.6, 5.5),
    "mnist/vit": (9.3, 0, 0, 0, 8.4),
    "cifar10/4c3f": (8.2, 16.3, 49.1, 20.4, 7.4),
    "cifar10/6c2f": (17.5, 35.0, 140.1, 43.7, 19.2),
    "cifar10/vit": (331.5, 0, 0, 0, 358.0),
    "cifar100/8c2f": (128.6, 0, 514.3, 360.7, 77.1),
    "cifar100/vit": (397.6, 0, 0, 0, 429.4),
    "tinyimagenet/8c2f": (583.0, 0, 2331.8, 1020.2, 349.8),
    "tinyimagenet/vit": (2860.1, 0, 0, 0, 3088.9),
}
"""Network -> FLOPs of Table 1, 10^13: standard, BCP, GloRo, Local-Lip, CertViT; 0: no such row."""

_METHODS = ("standard", "bcp", "gloro", "local-lip", "certvit")

_ADAPTED = {
    "vit-t16": (6.4, 7.7, 0.1, 1.2),
    "vit-s16": (25.0, 31.2, 0.1, 1.2),
    "vit-s32": (6.4, 7.7, 0.1, 1.2),
    "vit-b8": (392.7, 471.2, 0.2, 1.3),
    "vit-b16": (100.6, 120.7, 0.2, 1.2),
    "vit-b32": (25.6, 30.7, 0.2, 1.3),
    "vit-l16": (350.4, 420.5, 0.2, 1.3),
    "deit-t": (6.4, 8.2, 0.1, 1.2),
    "deit-s": (26.7, 33.2, 0.2, 1.2),
    "deit-b": (396.8, 473.2, 0.2, 1.3),
    "swin-t": (26.3, 31.5, 0.1, 1.2),
    "swin-s": (50.1, 59.9, 0.2, 1.2),
    "swin-b": (90.3, 108.4, 0.25, 1.3),
    "swin-l": (199.9, 239.8, 0.25, 1.3),
}
"""Model -> Table 2's L2 and CertViT FLOPs, 10^16, Table 10's beta and lambda."""


def rows() -> Iterator[Row]:
    for name, printed in _NETWORKS.items():
        data, _, net = name.partition("/")
        arch = f"certvit_{'l2_' if net == 'vit' else ''}{net}_{data}"
        shape = _SHAPES.get(data, "3x32x32")
        for method, flops in zip(_METHODS, printed, strict=True):
            if flops:
                command = f"{arch} --shape {shape} --images 50000 --printed {flops}e13"
                yield Row(
                    f"certvit-1f/{name}/{method}",
                    (data, net, method, f"{flops:g}"),
                    {"count": f"python -m benchmarks.tables.count {command}"},
                    {"epochs": "count/epochs"},
                    quick=True,
                )
    for name, (label, arch, _) in MODELS.items():
        flops, then, beta, relaxation = _ADAPTED[name]
        command = f"{arch} --tied --printed {flops}e16 --then {then}e16"
        typed = f"--preset certvit-paper-tables --beta {beta} --relaxation {relaxation}"
        yield Row(
            f"certvit-10/{name}",
            (label, f"`certvit constrain CKPT {typed}`"),
            {"count": f"python -m benchmarks.tables.count {command}"},
            {"epochs": "count/epochs", "ratio": "count/ratio"},
            quick=True,
        )
