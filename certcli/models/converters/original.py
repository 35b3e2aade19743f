"""State dicts of DINOv2, BEiT, Swin, ConvNeXt and OpenCLIP, converted by timm's own filters."""

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

from torch import Tensor, nn

from certcli.system.errors import ArchitectureError, CertvitError, one_line

_RESAMPLED = re.compile(r"pos_embed|patch_embed|relative_position|head")
"""Tensors whose shape may differ before the filter: embeddings of another image size, and heads that it renames."""


def filtered(tensors: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor] | None:
    """Return the tensors as timm's `checkpoint_filter_fn` for the network renames them; None where
    timm has no filter.

    Raises:
        ArchitectureError: the filter would resample an embedding, or drop a layer: another function
        than the file's.
    """
    module: Any = sys.modules[type(net).__module__]
    convert = getattr(module, "checkpoint_filter_fn", None)
    expected = net.state_dict()
    wrong = [
        name
        for name in tensors.keys() & expected.keys()
        if tensors[name].shape != expected[name].shape
    ]
    if convert is None or not all(_RESAMPLED.search(name) for name in wrong):
        return None  # tensors of other widths: no renaming makes them fit
    layer = next((name for name in tensors if "pre_logits" in name), None)
    if layer is not None:
        raise ArchitectureError(
            f"'{one_line(layer)}' belongs to a representation layer, which timm's network lacks"
        )
    options = (
        {"adapt_layer_scale": True}
        if "adapt_layer_scale" in inspect.signature(convert).parameters
        else {}
    )
    resampling = [name for name in vars(module) if name.startswith(("resample_", "resize_"))]
    try:
        with mock.patch.dict(vars(module), dict.fromkeys(resampling, _refuse)):
            return dict(convert(dict(tensors), net, **options))
    except CertvitError:
        raise
    except Exception:  # the filter expects other names
        return None


def _refuse(*_: Any, **__: Any) -> None:
    raise ArchitectureError(
        "the file's embeddings are for another image or patch size: resampled, they are another network",
        "--arch-arg img_size=... for the size that it was trained with",
    )
