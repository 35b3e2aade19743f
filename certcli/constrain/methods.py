"""The names of the proximal maps and what they minimise; importing this file imports no torch."""

from certcli.system.registry import Entry, Registry

PENALTIES = Registry(
    "prox",
    Entry(
        "spectral",
        "certcli.constrain.prox:SPECTRAL",
        "least spectral norm at the allowed output error (levels the top singular values)",
        "Combettes & Pesquet 2011, Moreau decomposition onto the nuclear-norm ball",
    ),
    Entry(
        "l1",
        "certcli.constrain.prox:L1",
        "least sum of absolute weights (soft threshold), the paper's choice",
        "CertViT, Algorithm 1",
    ),
    Entry(
        "nuclear",
        "certcli.constrain.prox:NUCLEAR",
        "least sum of singular values (soft threshold of the singular values)",
        "Cai, Candes & Shen 2010",
    ),
)
"""Penalties that Douglas-Rachford minimises over the layers of bounded output error."""

METHODS = Registry(
    "prox",
    *PENALTIES,
    Entry(
        "ball",
        "certcli.constrain.spectral_ball:constrain_ball",
        "least output error on a spectral ball, the radius found by bisection (Douglas-Rachford)",
        "Combettes & Pesquet 2007",
    ),
    Entry(
        "clip",
        "certcli.constrain.spectral_ball:constrain_clip",
        "singular values cut at the lowest level that keeps the output error; the rest of the layer is not re-fitted",
        "Sedghi, Gupta & Long 2019",
    ),
)
"""Everything `--prox` takes: the penalties, and the two methods that search a radius."""
