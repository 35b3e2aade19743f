"""CertViT's Tables 2 and 3: 14 models of timm, counted, and taken through the pipeline."""

from collections.abc import Iterator

from benchmarks.tables.layout import ASSUMED, COUNTED, FORMULA, SOUND, Column, Row, Table

MODELS = {
    "vit-t16": ("ViT-T/16", "vit_tiny_patch16_224", 50),
    "vit-s16": ("ViT-S/16", "vit_small_patch16_224", 50),
    "vit-s32": ("ViT-S/32", "vit_small_patch32_224", 70),
    "vit-b8": ("ViT-B/8", "vit_base_patch8_224", 70),
    "vit-b16": ("ViT-B/16", "vit_base_patch16_224", 50),
    "vit-b32": ("ViT-B/32", "vit_base_patch32_224", 50),
    "vit-l16": ("ViT-L/16", "vit_large_patch16_224", 70),
    "deit-t": ("DeiT-T", "deit_tiny_patch16_224", 50),
    "deit-s": ("DeiT-S", "deit_small_patch16_224", 70),
    "deit-b": ("DeiT-B", "deit_base_patch16_224", 70),
    "swin-t": ("Swin-T", "swin_tiny_patch4_window7_224", 40),
    "swin-s": ("Swin-S", "swin_small_patch4_window7_224", 50),
    "swin-b": ("Swin-B", "swin_base_patch4_window7_224", 50),
    "swin-l": ("Swin-L", "swin_large_patch4_window7_224", 70),
}
"""Name -> the paper's name, timm's, and the epochs of adaptation of the paper's Table 10."""

SIZES = Table(
    "certvit-2",
    "CertViT, Table 2: parameters and operations of 14 models",
    ("model",),
    (
        Column("parameters", "parameters, 10^6", "number", COUNTED),
        Column("tied", "with L2 attention, 10^6", "number", COUNTED),
        Column("adapt", "L2 adaptation, 10^16", "number", ASSUMED),
        Column("macs", "multiply-adds an image, 10^9", "number", COUNTED),
    ),
    "Counted on timm's networks without weights (meta device). L2 attention ties queries and keys, so it has one "
    "matrix less a block. For the adaptation the paper does not say what it counts: ours is one forward pass of "
    "every ImageNet-1k training image (1,281,167) for the epochs of its Table 10, in multiply-adds. A backward "
    "pass would triple it. Decoded: Table 10 below; CertViT's own FLOPs are 1.2 times "
    "those of the adaptation.",
)

PIPELINE = Table(
    "certvit-3",
    "CertViT, Table 3: pretrained networks with L2 attention, constrained",
    ("model", "stage"),
    (
        Column("clean", "clean %"),
        Column("attacked", "PGD %"),
        Column("certified", "certified %", promise=SOUND),
        Column("upper", "Lipschitz", "power", SOUND),
        Column("formula", "Lipschitz by the paper's formula", "power", FORMULA),
    ),
    "Top-1 among 1,000 classes on Imagenette's validation images (the paper: ImageNet's); l2 radius 36/255. The "
    "paper adapts for 50 to 70 epochs on ImageNet; `adapt` here fits each attention to the old one's outputs on "
    "100 images. 13 models are runnable where their weights are; ViT-Tiny's were.",
    "other images, no epochs on ImageNet",
)

TABLES = (SIZES, PIPELINE)


def rows() -> Iterator[Row]:
    for name, (label, arch, epochs) in MODELS.items():
        yield Row(
            f"certvit-2/{name}",
            (label,),
            {"count": f"python -m benchmarks.tables.count {arch} --epochs {epochs}"},
            {column.key: f"count/{column.key}" for column in SIZES.columns},
            quick=True,
        )
    for name, (label, arch, _) in MODELS.items():
        yield from _pipeline(name, label, arch)


def _pipeline(name: str, label: str, arch: str) -> Iterator[Row]:
    start = f"{{weights}}/{arch}"
    images = "--dataset {imagenette}"
    root = f"certvit-3/{name}"
    stages = {
        "dp": ("dot-product attention", "", start),
        "l2": (
            "L2 attention",
            f"certvit adapt {start} {images} --attention l2 --norm keep --residual keep --limit 100 --epochs 1 --distill 0 "
            "-o net.safetensors --force",
            "net.safetensors",
        ),
        "certvit": (
            "constrained",
            f"certvit constrain {{{root}/l2}}/net.safetensors {images} --prox l1 --beta 0.01 --eta 0.1 --limit 200 "
            "-o net.safetensors --force",
            "net.safetensors",
        ),
        "spectral": (
            "constrained, our default map (ours)",
            f"certvit constrain {{{root}/l2}}/net.safetensors {images} --limit 200 -o net.safetensors --force",
            "net.safetensors",
        ),
    }
    for stage, (what, command, net) in stages.items():
        steps = {"make": command} if command else {}
        steps |= {
            "attack": f"certvit attack {net} {images} --split val -a pgd-20 -e 36/255 --limit 200 --no-checks",
            "bound": f"certvit lipschitz {net} --no-estimate",
        }
        columns = {
            "clean": "attack/clean",
            "attacked": "attack/robust",
            "upper": "bound/log10_upper",
        }
        if stage != "dp":  # the paper's formula speaks of L2 attention
            steps["formula"] = f"python -m benchmarks.formulas certvit {net}"
            columns["formula"] = "formula/log10_total"
        yield Row(
            f"{root}/{stage}",
            (label, what),
            steps,
            columns,
            after=(f"{root}/l2",) if stage in ("certvit", "spectral") else (),
            note="200 images, PGD-20",
        )
