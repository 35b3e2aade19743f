"""Lets `import torchvision` (hence timm and torchattacks) work beside a CPU build of torch.

The registry's torchvision wheel is linked against CUDA torch. Beside a CPU torch its compiled operators do not load, and
its Python part then fails with "operator torchvision::nms does not exist", because it registers shape functions for two
operators whose schemas only the compiled part declares. Declaring those two schemas is enough: certvit never calls them.
"""

import importlib
import sys

import torch

_MISSING_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a Library withdraws its schemas when it is collected


def ensure_torchvision() -> None:
    """Import torchvision; where that fails for want of `torchvision::nms`, declare the schemas and import again."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as failure:
        if "torchvision::" not in str(failure):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for schema in _MISSING_SCHEMAS:
            library.define(schema)
        _declared.append(library)
        importlib.import_module("torchvision")


ensure_torchvision()
