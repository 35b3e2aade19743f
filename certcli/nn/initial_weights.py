"""Initial weights of the papers, in place of those of the architecture's own code."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from certcli.system.errors import ArchitectureError


@torch.no_grad()
def spectral(net: nn.Module) -> None:
    """Set W <- W / |W|_2, W ~ N(0, 2 / (inputs + outputs)), in place.

    It concerns convolutions and linear layers outside attention; biases stay. SpecFormer calls
    sigma_max "its largest eigenvalue": of matrices that are not square it is the singular value.

    Raises:
        ArchitectureError: there is no such layer, or a convolution whose windows overlap, whose
            norm depends on the image.
    """
    layers = list(_outside_attention(net))
    if not layers:
        raise ArchitectureError("there is no convolution and no linear layer outside attention")
    for path, layer in layers:
        if isinstance(layer, nn.Conv2d) and not _is_patchwise(layer):
            raise ArchitectureError(
                f"{path}: the norm of a convolution whose windows overlap depends on the image",
                "certvit finetune --project spectral divides by it after each step",
            )
        nn.init.xavier_normal_(layer.weight)
        layer.weight.div_(_norm(layer.weight))


@torch.no_grad()
def deepnet(net: nn.Module) -> None:
    """Set weights from N(0, 2 g^2 / (inputs + outputs)), in place: g = (8 N)^(-1/4) for values,
    output maps and MLPs of the N blocks, 1 for queries and keys.

    LayerScale, where the network has it, is set to 1 / alpha, alpha = (2 N)^(1/4), since
    norm(alpha x + f(x)) = norm(x + f(x) / alpha). SpecFormer quotes the constants of an encoder
    with a decoder of M blocks, which a vision transformer does not have.

    Raises:
        ArchitectureError: there is no block of attention and MLP, or one of another form.
    """
    blocks = [
        (path, block)
        for path, block in net.named_modules()
        if hasattr(block, "attn") and hasattr(block, "mlp")
    ]
    if not blocks:
        raise ArchitectureError("there is no block of attention and MLP to scale")
    gain = (8 * len(blocks)) ** -0.25
    for path, block in blocks:
        attention, mlp = block.attn, block.mlp
        maps = [getattr(part, name, None) for part, name in _maps(attention, mlp)]
        if not all(isinstance(layer, nn.Linear) for layer in maps):
            raise ArchitectureError(
                f"{path}: a block without qkv, proj, fc1 and fc2, so that no weight is known to be a value's"
            )
        query_key = 2 * attention.qkv.out_features // 3
        nn.init.xavier_normal_(attention.qkv.weight[:query_key])
        nn.init.xavier_normal_(attention.qkv.weight[query_key:], gain)
        for layer in maps[1:]:
            nn.init.xavier_normal_(layer.weight, gain)  # type: ignore[union-attr]
        for name in ("ls1", "ls2"):
            scale = getattr(getattr(block, name, None), "gamma", None)
            if isinstance(scale, Tensor):
                scale.fill_((2 * len(blocks)) ** -0.25)


def _maps(attention: nn.Module, mlp: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    return (attention, "qkv"), (attention, "proj"), (mlp, "fc1"), (mlp, "fc2")


def _outside_attention(net: nn.Module) -> Iterator[tuple[str, nn.Conv2d | nn.Linear]]:
    for path, module in net.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and "attn" not in path:
            yield path, module


def _is_patchwise(layer: nn.Conv2d) -> bool:
    return (
        layer.kernel_size == layer.stride
        and not any(layer.padding)
        and layer.dilation == (1, 1)
        and layer.groups == 1
    )


def _norm(weight: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(weight.flatten(1).double(), 2).to(weight)
