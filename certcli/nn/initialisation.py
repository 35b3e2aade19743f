"""The initial weights that `certvit init` can give a network. Importing this file imports no torch."""

from certcli.system.registry import Entry, Registry

INITIALISATIONS = Registry(
    "initialisation",
    Entry(
        "spectral",
        "certcli.nn.initial_weights:spectral",
        "convolutions and linear layers outside attention: Xavier's weights over their spectral norm",
        "Qi et al. 2023, as SpecFormer's eq. 43 quotes it",
    ),
    Entry(
        "deepnet",
        "certcli.nn.initial_weights:deepnet",
        "Xavier's weights; values, output maps and MLPs times (8 N)^(-1/4) of N blocks",
        "Wang et al. 2022, DeepNet, for encoders",
    ),
)
