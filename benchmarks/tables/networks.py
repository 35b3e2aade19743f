"""Rows of CertViT's Table 1 that count the parameters of its networks."""

from benchmarks.tables.layout import Row

TABLE_4 = {
    "mnist": "--arch-arg depth=6 --arch-arg embed_dim=128 --arch-arg mlp_ratio=4",
    "cifar10": "--arch-arg depth=6 --arch-arg embed_dim=192 --arch-arg mlp_ratio=3",
    "cifar100": "--arch-arg depth=12 --arch-arg embed_dim=192 --arch-arg mlp_ratio=3",
    "tinyimagenet": "--arch-arg depth=12 --arch-arg embed_dim=384 --arch-arg mlp_ratio=3",
}
"""Layers, width and MLP ratio as that table of the paper prints them."""

DECODED = (
    "Rows called decoded train some of these nine, one seed, each method for some 180 CPU seconds on one core (72 to 265 "
    "were taken: their own column; three seeds would have taken hours), where the paper takes 100 to 800 epochs on GPUs; "
    "CertViT's 180 include the standard training that it starts from. AdamW at 1e-3 (of 1e-3 and 3e-3 the better one on "
    "validation images, after 50 CPU seconds of GloRo and of BCP), but orthogonal steps for CertViT's 4C3F on MNIST; "
    "Local-Lip on MNIST takes GloRo's form of the loss. What came out of this: on MNIST CertViT certifies most and BCP "
    "least, as in the paper, but Local-Lip less than GloRo, which also withstands PGD best; on CIFAR-10 CertViT certifies "
    "most, too, but in 78 seconds more than GloRo, which is 1.3 points behind and withstands PGD better, as does the "
    "standard network. GloRo saw two epochs of MNIST, BCP and Local-Lip a quarter of one. BCP and Local-Lip take no ViT, "
    "which is no chain; `adapt` knows no replacement for the blocks of the decoded ViTs, and with floors under LayerNorm "
    "the margin loss leaves a bound of 10^16 and more, which certifies nothing: both fall to chance with GloRo, MNIST's with "
    "CertViT too, whose row ends with code 1, CIFAR-10's keeps 22 % in 90 steps of 32 images. A GPU is needed for 6C2F, both "
    "8C2F, and the ViTs of CIFAR-100 and TinyImageNet. "
)
"""What is said of their training, whose rows stand in decoded.py."""


def network_row(data: str, title: str, net: str, arch: str) -> Row:
    """Count the network that the paper counts, without weights; a ViT also as its Table 4 describes
    it.

    Args:
        data: name of the data set in rows. title: its name on the page. net: 4c3f, 6c2f, 8c2f or
            vit.
    """
    count = f"python -m benchmarks.tables.count {arch}"
    steps = {"count": count}
    figures = {"parameters": "count/parameters"}
    if net == "vit":
        steps["table4"] = f"{count} {TABLE_4[data]}"
        figures["tabulated"] = "table4/parameters"
    label = "ViT" if net == "vit" else net.upper()
    cells = (title, label, f"`{arch}`, counted")
    return Row(f"certvit-1/{data}/{net}/network", cells, steps, figures)
