"""certvit for Python: the functions of `certcli.api` under the name of the distribution. Documented
in docs/api.md.
"""

from certcli import __version__
from certcli.api import (
    adapt,
    attack,
    audit,
    bound,
    bounds,
    certify,
    constrain,
    finetune,
    history,
    images,
    load,
    network,
    predict,
    save,
    shares,
    slope,
)
from certcli.evaluation.threat import Patch
from certcli.system.errors import CertvitError

__all__ = [
    "CertvitError",
    "Patch",
    "__version__",
    "adapt",
    "attack",
    "audit",
    "bound",
    "bounds",
    "certify",
    "constrain",
    "finetune",
    "history",
    "images",
    "load",
    "network",
    "predict",
    "save",
    "shares",
    "slope",
]
