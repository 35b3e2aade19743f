"""Forward functions of the cases in `lipschitz_cases.py`: each takes the module that holds its
parts, and its input.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def written_attention(attention: nn.Module, x: Tensor, *, mask: bool = False) -> Tensor:
    """Dot-product attention from matrix products, as unfused timm modules write it."""
    b, n, d = x.shape
    qkv = attention.parts[0](x).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    scores = (q * (d // 2) ** -0.5) @ k.transpose(-2, -1)
    if mask:
        scores = scores + attention.mask
    return attention.parts[1]((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))


def fused_heads(attention: nn.Module, x: Tensor, **options: object) -> Tensor:
    b, n, d = x.shape
    qkv = attention.parts[0](x).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], **options)
    return attention.parts[1](out.transpose(1, 2).reshape(b, n, d))


def talking(attention: nn.Module, x: Tensor) -> Tensor:
    """Heads mixed before and after the softmax, as in CaiT."""
    b, n, d = x.shape
    q, k, v = attention.parts[0](x).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
    scores = attention.parts[2]((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    mixed = attention.parts[3](scores.softmax(dim=-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return attention.parts[1]((mixed @ v).transpose(1, 2).reshape(b, n, d))


def cross_covariance(attention: nn.Module, x: Tensor) -> Tensor:
    """Attention between channels, as in XCiT (with an eps that a search can reach)."""
    b, n, d = x.shape
    q, k, v = attention.parts[0](x).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 4, 1).unbind(0)
    q = functional.normalize(q, dim=-1, eps=0.5)
    k = functional.normalize(k, dim=-1, eps=0.5)
    weights = ((q @ k.transpose(-2, -1)) * attention.temperature).softmax(dim=-1)
    return (weights @ v).permute(0, 3, 1, 2).reshape(b, n, d)


def squeeze_excite(net: nn.Module, x: Tensor) -> Tensor:
    y = net.parts[0](x)
    return y * net.parts[1](y.mean((2, 3), keepdim=True)).sigmoid()


def side_by_side(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([part(x[:, 0, :3]) for part in net.parts], dim=1)


def augmented(net: nn.Module, x: Tensor) -> Tensor:
    y = net.parts[0](x)
    y += x
    y *= 3
    y -= 0.5
    y /= 2
    return y


def moving(net: nn.Module, x: Tensor) -> Tensor:
    scores = (x @ net.parts[0](x)[..., :8].transpose(1, 2)) * 0.5 + net.parts[2](x)
    return scores.softmax(dim=-1) @ net.parts[1](x)


def two_names(net: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    z = y  # the same tensor: it grows as well
    y += x
    y.mul_(1.5)
    return y + z


def spellings(net: nn.Module, x: Tensor) -> Tensor:
    """torch's keywords and NumPy's, in place of positions."""
    y = (
        torch.permute(input=x, dims=(0, 2, 3, 1))
        .transpose(dim0=1, dim1=2)
        .flip(dims=(1, -1))
        .permute(dims=(0, 3, 1, 2))
    )
    y = torch.cat(tensors=[y, x.swapaxes(axis0=2, axis1=3)], axis=1).roll(shifts=1, dims=2)
    z = y.mean(axis=(2, 3), keepdims=True) - torch.sum(input=y, axis=1, keepdim=True).softmax(
        axis=2
    )
    w = torch.stack(tensors=(y, torch.add(input=y, other=z, alpha=2)), axis=-1)
    return w.sum(axis=-1).amax(axis=1).unsqueeze(dim=1) + torch.flatten(
        input=y, start_dim=2
    ).reshape(shape=(-1, 4, 4, 4))


def axes(net: nn.Module, x: Tensor) -> Tensor:
    """(b, 4, 6) -> (b, 6, 4), folded into the maps before and after."""
    y = x.movedim(-1, 1)
    return y + torch.moveaxis(torch.swapdims(y, 1, 2), (0, 1, 2), (0, 2, 1))


def parts_of(net: nn.Module, x: Tensor) -> Tensor:
    y = x.narrow(dim=2, start=-3, length=2) * 3 + torch.narrow(x, -1, 1, 2)
    y = y + x.narrow(2, -2, 2) + x[:, None, :, 2:4].flatten(0, 1)
    return torch.cat([y.flatten(1), torch.select(x, 1, -2), 2 * x.select(dim=2, index=1)], dim=-1)


def slices(net: nn.Module, x: Tensor) -> Tensor:
    """Parts of images whose fibres lie along each axis in turn, and of a map that waits along the
    channels, with axes before, behind and between those that are chosen.
    """
    rows = functional.normalize(x.reshape(-1, 4, 2, 4), dim=2)
    channels = functional.normalize(x.expand(-1, 2, -1, -1), dim=1)
    wide = net.parts[0](x)
    named = [
        rows[:, ..., 1],
        rows[..., -1, 1:3],
        rows[:, :, None, 0],
        channels[..., 1],
        channels[:, ..., 0, None],
        wide[..., 1],
        wide[:, None, ..., :2],
        wide[..., 2, :],
        wide[:, 0],
        wide[:, 1:][:, :, None],
        wide.narrow(1, -1, 1),
        rows.unbind(2)[1],
        *wide.split(1, 3),
        torch.chunk(wide, 2, 1)[1],
        wide.split([1, 1], dim=1)[0],
    ]
    return torch.cat([part.flatten(1) for part in named], dim=1)


def beside_constants(net: nn.Module, x: Tensor) -> Tensor:
    """Tensors beside others and beside constants, along the axis of the rows and along another."""
    rows = torch.cat([x, -x, 7 * net.row.expand(1, 4, -1)], -1)
    return torch.stack([rows, 3 + torch.cat((rows, rows), 2)[..., 24:]], 2)


def constant_branches(net: nn.Module, x: Tensor) -> Tensor:
    """Branches of weight 0 are constants, which are added to a map that waits or taken from it."""
    y = net.parts[0](x)
    shift = functional.linear(x, net.zeros, net.row)
    y = net.parts[0](torch.sub(y, shift, alpha=3)) - shift
    weighed = functional.linear(functional.relu(x * 0.0 + net.row), net.diagonal, net.row)
    return (shift - net.parts[0](y)) + (net.parts[0](weighed) - (y + weighed))


def scores_alone(net: nn.Module, x: Tensor) -> Tensor:
    """Scores that no softmax follows, shifted, masked, and with a tensor added."""
    scores = x @ net.parts[0](x).transpose(1, 2)
    shifted = torch.cat([scores + 50.0, scores.masked_fill(net.mask, 6e3)], 1)
    return torch.cat([shifted, scores + 1e3 * net.parts[1](x)], 1)


def torch_attention(net: nn.Module, x: Tensor) -> Tensor:
    """Batch first and last, with weights and without, with masks that are yes or no, numbers, and
    of keys.
    """
    y, _ = net.parts[0](x, x, x, attn_mask=net.mask)
    z = x.transpose(0, 1)
    z = net.parts[1](z, z, z, need_weights=False, attn_mask=net.shift)[0].transpose(0, 1)
    w, _ = net.parts[2](x, x, x, net.mask[1:2].expand(len(x), -1), need_weights=False)
    return y + 2 * z - w


def choice(net: nn.Module, x: Tensor) -> Tensor:
    y = torch.where(net.mask, x, 0.3 * x.flip(1))  # entries of either
    y = y.where(net.mask[:, :1], net.row)  # rows of a constant
    return torch.where(net.mask[:1], x[:, :1], y) + torch.where(net.mask, 2.0, y)


def choice_of_scores(net: nn.Module, x: Tensor) -> Tensor:
    q, k, v = net.parts[0](x).chunk(3, dim=-1)
    scores = torch.where(net.mask, q @ k.transpose(1, 2), -torch.inf)
    # no constant added to the scores, but one in their place
    finite = torch.where(net.mask, q @ k.transpose(1, 2), -0.5)
    return net.parts[1](scores.softmax(dim=-1) @ v) + finite.softmax(dim=-1) @ v


def larger_of_both(net: nn.Module, x: Tensor) -> Tensor:
    y = torch.maximum(x, net.parts[0](x)).minimum(torch.tensor(1.5)) + torch.max(net.row, x)
    return torch.cat([y, torch.minimum(x[:, :1], x).clamp_max(0.5)], dim=1) - torch.clamp_min(
        x, -0.2
    ).amax(dim=(1, 2), keepdim=True)


def deviations(net: nn.Module, x: Tensor) -> Tensor:
    y = x.std(dim=-1) + 2 * torch.std(x, (1, 2), False).unsqueeze(-1)
    spread, middle = torch.std_mean(x, dim=(1, 2), correction=3, keepdim=True)
    return torch.cat([y, (spread - middle)[..., 0], x.std(1, unbiased=False)], dim=1)


def variances(net: nn.Module, x: Tensor) -> Tensor:
    y = torch.var(x, -1, unbiased=False) - x.var(1, keepdim=True).squeeze(1)[:, :4]
    spread, middle = torch.var_mean(x, axis=1, correction=0)
    return torch.cat(
        [y, 0.1 * spread - middle, x.var(dim=[1, 2], correction=30).unsqueeze(1)], dim=1
    )


def unfolded_and_folded(net: nn.Module, x: Tensor) -> Tensor:
    blocks = functional.unfold(x, 2, stride=2)
    y = functional.fold(
        blocks.repeat(1, 1, 4)[..., :9], (4, 5), kernel_size=(2, 2), dilation=(1, 2), stride=1
    )
    return y.mean((2, 3)) + functional.fold(
        blocks, output_size=4, kernel_size=2, padding=1, stride=3
    ).mean((1, 2, 3)).unsqueeze(1)


def add_product(net: nn.Module, x: Tensor) -> Tensor:
    rows = x.reshape(-1, 8)
    y = torch.addmm(input=net.s, mat1=rows, mat2=net.t, beta=-2.0, alpha=3.0)
    z = torch.addmm(
        net.parts[0](rows), rows[:, :4] @ net.t[:4], torch.eye(3).to(x), beta=0.5, alpha=0.5
    )
    return (y.addmm(rows, net.t) + z).reshape(-1, 12)


def lerp(net: nn.Module, x: Tensor) -> Tensor:
    y = torch.lerp(x, net.parts[0](x), 1.7)
    return y.lerp(net.row, 0.25) + torch.lerp(net.row.expand_as(x), y, net.share)
