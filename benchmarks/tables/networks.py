"""Rows of CertViT's Table 1 that count the parameters of its networks."""

from benchmarks.tables.layout import Row

TABLE_4 = {
    "mnist": "--arch-arg depth=6 --arch-arg embed_dim=128 --arch-arg mlp_ratio=4",
    "cifar10": "--arch-arg depth=6 --arch-arg embed_dim=192 --arch-arg mlp_ratio=3",
    "cifar100": "--arch-arg depth=12 --arch-arg embed_dim=192 --arch-arg mlp_ratio=3",
    "tinyimagenet": "--arch-arg depth=12 --arch-arg embed_dim=384 --arch-arg mlp_ratio=3",
}
"""Layers, width and MLP ratio as that table of the paper prints them."""


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
