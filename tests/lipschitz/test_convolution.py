"""Norms of convolutions as upper bounds, against the dense matrix that torch's own convolution
gives.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from certcli.lipschitz.numerics import convolution, eigenvalues
from certcli.lipschitz.numerics.convolution import Geometry, conv_norm
from certcli.lipschitz.numerics.spectral import spectral_norm
from certcli.lipschitz.rules.convolution import pads_with_zeros
from certcli.system.errors import CheckpointError, UsageError
from tests.helpers.grids import crossed

# LAPACK's and the dense convolution's own rounding; the bound is proven, the oracle is rounded.
ORACLE = 1e-13

CONVOLUTIONS = {  # out, in, kernel, stride, padding, dilation, groups, image
    "3x3": (6, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1, (8, 8)),
    "3x3, more inputs than outputs": (3, 7, (3, 3), (1, 1), (1, 1), (1, 1), 1, (6, 7)),
    "3x3 on one pixel": (3, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1, (1, 1)),
    "3x3 without padding": (4, 4, (3, 3), (1, 1), (0, 0), (1, 1), 1, (7, 6)),
    "3x3 stride 2": (5, 4, (3, 3), (2, 2), (1, 1), (1, 1), 1, (9, 8)),
    "7x7 stride 2, a stem": (6, 3, (7, 7), (2, 2), (3, 3), (1, 1), 1, (11, 12)),
    "7x7 stride 4, overlapping patches": (8, 3, (7, 7), (4, 4), (3, 3), (1, 1), 1, (13, 16)),
    "5x5 stride 3": (4, 2, (5, 5), (3, 3), (2, 2), (1, 1), 1, (10, 10)),
    "patches": (12, 3, (4, 4), (4, 4), (0, 0), (1, 1), 1, (12, 8)),
    "cropped patches": (12, 3, (4, 4), (4, 4), (0, 0), (1, 1), 1, (11, 10)),
    "kernel smaller than stride": (5, 3, (2, 2), (3, 3), (1, 1), (1, 1), 1, (8, 9)),
    "pointwise": (5, 7, (1, 1), (1, 1), (0, 0), (1, 1), 1, (4, 4)),
    "pointwise, padded and strided": (5, 7, (1, 1), (2, 2), (1, 1), (1, 1), 1, (5, 4)),
    "whole image": (9, 2, (6, 6), (1, 1), (0, 0), (1, 1), 1, (6, 6)),
    "dilated": (4, 5, (3, 3), (1, 1), (2, 2), (2, 2), 1, (8, 8)),
    "dilated and strided": (4, 3, (3, 3), (2, 2), (2, 2), (2, 2), 1, (9, 9)),
    "dilation that divides by the stride unevenly": (
        4,
        3,
        (3, 3),
        (4, 4),
        (3, 3),
        (6, 6),
        1,
        (20, 17),
    ),
    "grouped": (6, 9, (3, 3), (1, 1), (1, 1), (1, 1), 3, (7, 7)),
    "grouped and strided": (8, 4, (3, 3), (2, 2), (1, 1), (1, 1), 2, (8, 9)),
    "depthwise": (6, 6, (5, 5), (1, 1), (2, 2), (1, 1), 6, (8, 7)),
    "depthwise stride 2": (6, 6, (3, 3), (2, 2), (1, 1), (1, 1), 6, (9, 9)),
    "depthwise dilated": (4, 4, (3, 3), (1, 1), (3, 3), (3, 3), 4, (9, 10)),
    "depthwise with multiplier": (8, 4, (3, 3), (1, 1), (1, 1), (1, 1), 4, (7, 8)),
    "one output channel": (1, 5, (3, 3), (1, 1), (1, 1), (1, 1), 1, (7, 8)),
    "asymmetric kernel": (4, 3, (1, 5), (1, 1), (0, 2), (1, 1), 1, (5, 9)),
    "asymmetric everything": (4, 3, (5, 3), (1, 2), (3, 0), (2, 1), 1, (9, 8)),
    "padding beyond the kernel": (3, 2, (2, 2), (1, 1), (4, 5), (1, 1), 1, (3, 4)),
    "even kernel": (3, 2, (4, 4), (1, 1), (2, 2), (1, 1), 1, (6, 6)),
    "one axis": (6, 4, (3,), (1,), (1,), (1,), 1, (17,)),
    "one axis, strided": (6, 4, (7,), (3,), (2,), (1,), 1, (20,)),
    "one axis, depthwise": (4, 4, (5,), (1,), (2,), (1,), 4, (12,)),
    "one axis, patches": (6, 2, (4,), (4,), (0,), (1,), 1, (16,)),
}
KINDS = (
    "gaussian",
    "positive",
)  # the positive one is nearly periodic: its top vector fills the image


def _weight(name: str, kind: str) -> torch.Tensor:
    out, channels, kernel, *_, groups, _ = CONVOLUTIONS[name]
    draw = torch.randn if kind == "gaussian" else torch.rand
    return draw(
        out,
        channels // groups,
        *kernel,
        generator=torch.Generator().manual_seed(len(name)),
        dtype=torch.float64,
    )


def _options(name: str) -> dict:
    _, _, _, stride, padding, dilation, groups, image = CONVOLUTIONS[name]
    return {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "input_size": image,
    }


def _norm(weight: torch.Tensor, options: dict, transposed: bool = False) -> float:
    """The bound, of options as torch has them: a number or a pair for each axis."""
    rank = weight.ndim - 2
    each = {k: v if isinstance(v, tuple) else (v,) * rank for k, v in options.items()}
    padding = tuple(p if isinstance(p, tuple) else (p, p) for p in each["padding"])
    whole = {"padding": padding, "groups": options["groups"], "transposed": transposed}
    return conv_norm(weight, Geometry(**each | whole))


def _dense_norm(weight: torch.Tensor, options: dict, *, output_padding: int | None = None) -> float:
    """The oracle: the layer applied to every basis image; transposed where an output padding is
    given.
    """
    layer = dict(options)
    size = layer.pop("input_size")
    rank = weight.ndim - 2
    if output_padding is None:
        channels = weight.shape[1] * layer["groups"]
        apply = F.conv1d if rank == 1 else F.conv2d
    else:
        channels = weight.shape[0]
        apply = F.conv_transpose1d if rank == 1 else F.conv_transpose2d
        layer["output_padding"] = output_padding
    basis = torch.eye(channels * math.prod(size), dtype=torch.float64).view(-1, channels, *size)
    return float(torch.linalg.svdvals(apply(basis, weight.double(), **layer).flatten(1))[0])


def _only_the_torus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_DENSE_ENTRIES", 0)


@pytest.mark.parametrize(("name", "kind"), crossed([*CONVOLUTIONS], KINDS))
def test_small_convolutions_are_exact(name: str, kind: str) -> None:
    """1e-6 is what the spectral norm of a matrix promises."""
    weight = _weight(name, kind)
    options = _options(name)
    reference = _dense_norm(weight, options)
    assert reference * (1.0 - ORACLE) <= _norm(weight, options) <= reference * (1.0 + 1e-6)


@pytest.mark.parametrize(("name", "kind"), crossed([*CONVOLUTIONS], KINDS))
def test_transposed_convolutions(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output padding that torch accepts (below the stride or the dilation) is covered by the
    one bound.
    """
    weight = _weight(name, kind)
    options = _options(name)
    options["input_size"] = tuple(max(2, size // 3) for size in options["input_size"])
    most = min(max(s, d) for s, d in zip(options["stride"], options["dilation"]))
    sizes = zip(
        options["input_size"],
        options["stride"],
        options["padding"],
        options["dilation"],
        weight.shape[2:],
    )
    if any((n - 1) * s - 2 * p + d * (k - 1) + 1 < 1 for n, s, p, d, k in sizes):
        with pytest.raises(UsageError, match="does not fit"):
            _norm(weight, options | {"padding": 50}, transposed=True)
        return
    bound = _norm(weight, options, transposed=True)
    for output_padding in range(most):
        assert bound >= _dense_norm(weight, options, output_padding=output_padding) * (1.0 - ORACLE)
    _only_the_torus(monkeypatch)
    assert _norm(weight, options, transposed=True) >= bound * (1.0 - 1e-6)


@pytest.mark.parametrize(
    "name", ["3x3", "7x7 stride 2, a stem", "grouped", "depthwise stride 2", "one axis, strided"]
)
def test_torus_is_as_tight_as_its_fourier_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle takes another road: an FFT of the kernel and the aliases of strided sampling, as
    in Sedghi et al.

    1e-5: the certificate's shift lies up to 1e-6 above the best eigenvalue found, and may have to
    grow a few times.
    """
    _only_the_torus(monkeypatch)
    weight = _weight(name, "gaussian")
    options = _options(name)
    rank = weight.ndim - 2
    groups = options["groups"]
    sides = [
        -(-max(h + p, d * (k - 1) + 1) // s) * s
        for h, p, d, k, s in zip(
            options["input_size"],
            options["padding"],
            options["dilation"],
            weight.shape[2:],
            options["stride"],
        )
    ]
    spectrum = torch.fft.fftn(
        weight.view(groups, -1, *weight.shape[1:]), s=sides, dim=tuple(range(-rank, 0))
    )
    for axis, (side, stride) in enumerate(zip(sides, options["stride"])):
        spectrum = spectrum.unflatten(3 + 2 * axis, (stride, side // stride))
    order = [
        0,
        *(4 + 2 * axis for axis in range(rank)),
        1,
        2,
        *(3 + 2 * axis for axis in range(rank)),
    ]
    blocks = spectrum.permute(order).flatten(rank + 2).flatten(0, rank) / math.sqrt(
        math.prod(options["stride"])
    )
    reference = float(torch.linalg.svdvals(blocks).max())
    assert reference * (1.0 - ORACLE) <= _norm(weight, options) <= reference * (1.0 + 1e-5)


@given(data=st.data())
def test_any_geometry_lies_above_its_dense_matrix(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 2))

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    groups = data.draw(st.integers(1, 3))
    kernel = draw(1, 4)
    stride = draw(1, 4)
    dilation = draw(1, 3)
    padding = draw(0, 4)
    extra = draw(0, 5)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding)]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    options["input_size"] = tuple(low + more for low, more in zip(least, extra))
    shape = (groups * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), *kernel)
    weight = torch.randn(
        shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    reference = _dense_norm(weight, options)
    with pytest.MonkeyPatch.context() as patch:
        exact = _norm(weight, options)
        _only_the_torus(patch)
        torus = _norm(weight, options)
    assert exact >= reference * (1.0 - ORACLE)
    assert torus >= reference * (1.0 - ORACLE)


@pytest.mark.parametrize("sides", [((0, 1), (2, 0)), ((3, 1), (0, 0))])
@pytest.mark.parametrize("stride", [1, 2])
def test_padding_that_differs_between_the_sides(
    sides, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _weight("3x3", "gaussian")
    (top, bottom), (left, right) = sides
    basis = torch.eye(4 * 64, dtype=torch.float64).view(-1, 4, 8, 8)
    dense = F.conv2d(F.pad(basis, (left, right, top, bottom)), weight, stride=stride).flatten(1)
    reference = float(torch.linalg.svdvals(dense)[0])
    options = {"stride": stride, "padding": sides, "dilation": 1, "groups": 1, "input_size": 8}
    assert reference * (1.0 - ORACLE) <= _norm(weight, options) <= reference * (1.0 + 1e-6)
    _only_the_torus(monkeypatch)
    assert _norm(weight, options) >= reference * (1.0 - ORACLE)


def test_patches_give_the_norm_of_the_reshaped_kernel() -> None:
    weight = torch.randn(40, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    bound = conv_norm(weight, Geometry((4, 4), ((0, 0),) * 2, (1, 1), 1, (224, 224)))
    exact = spectral_norm(weight.flatten(1))
    assert exact <= bound <= exact * (1.0 + 1e-14)  # a few ulps of outward rounding


@pytest.mark.parametrize("channels", [(1, 1), (30, 30), (40, 28)])
def test_channel_counts_beyond_the_full_solver(
    channels: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large channel counts go through Lanczos and many chunks; the bound must not notice."""
    _only_the_torus(monkeypatch)
    monkeypatch.setattr(convolution, "_CHUNK_ENTRIES", {"cpu": 3000})
    weight = torch.randn(
        *channels, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    options = {
        "stride": (1, 1),
        "padding": (1, 1),
        "dilation": (1, 1),
        "groups": 1,
        "input_size": (5, 6),
    }
    reference = _dense_norm(weight, options)
    assert (
        reference * (1.0 - ORACLE) <= _norm(weight, options) <= reference * 1.3
    )  # a torus of 6 x 7


@pytest.mark.parametrize(
    "name", ["3x3", "7x7 stride 2, a stem", "depthwise", "depthwise stride 2", "one axis"]
)
def test_what_sums_over_taps_lose_is_added(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a coarse gamma everything is seen: 2 gamma |B|_F^2, B the sum of |V_q| of taps, or its
    root of one channel.
    """
    _only_the_torus(monkeypatch)
    monkeypatch.setattr(convolution, "gamma", lambda terms: terms * 2.0**-20)
    monkeypatch.setattr(convolution, "largest_of_chunks", lambda chunks: 0.0)
    weight = 8 * _weight(name, "gaussian")
    options = _options(name)
    rank = weight.ndim - 2
    groups = options["groups"]
    stride = options["stride"]
    cells = weight.abs().reshape(groups, len(weight) // groups, -1, *weight.shape[2:])
    pads = [
        pad for k, s in zip(reversed(weight.shape[2:]), reversed(stride)) for pad in (0, -k % s)
    ]
    taps = F.pad(cells, pads)
    for axis, step in enumerate(stride):
        taps = taps.unflatten(3 + 2 * axis, (-1, step))
    sums = taps.sum(dim=[3 + 2 * axis for axis in range(rank)])
    largest = float(sums.flatten(1).norm(dim=1).max())
    shifts = [-(-k // s) for k, s in zip(weight.shape[2:], stride)]
    count = math.prod(shifts)
    lags = math.prod(2 * n - 1 for n in shifts) // 2
    bound = _norm(weight, options)
    if groups == 1:
        side = max(cells.shape[1], cells.shape[2] * math.prod(stride))
        assert bound**2 >= 2 * (side * count + lags + 40) * 2.0**-20 * largest**2 * (1 - ORACLE)
    else:
        moved = F.pad(weight, pads)
        for axis, step in enumerate(stride):
            moved = moved.unflatten(2 + 2 * axis, (-1, step))
        still = float(
            moved.sum(dim=[2 + 2 * axis for axis in range(rank)]).flatten(1).norm(dim=1).max()
        )
        assert bound >= still + 2 * (count + 34) * 2.0**-20 * largest * (1 - ORACLE)


def test_failing_certificate_falls_back_to_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_the_torus(monkeypatch)
    weight = _weight("3x3", "gaussian")
    options = _options("3x3")
    monkeypatch.setattr(eigenvalues, "certify_below", lambda grams, shifts: [math.inf] * len(grams))
    bound = _norm(weight, options)
    windows = 3.0 * spectral_norm(weight.flatten(1))
    assert windows * (1.0 - ORACLE) <= bound <= windows * (1.0 + 1e-14)


def test_zero_overflow_and_poison() -> None:
    options = {"stride": 1, "padding": 1, "dilation": 1, "groups": 1, "input_size": 8}
    assert _norm(torch.zeros(3, 3, 3, 3), options) == 0.0
    assert _norm(torch.full((3, 3, 3, 3), 1e308, dtype=torch.float64), options) == math.inf
    for poison in (math.nan, math.inf):
        weight = torch.zeros(3, 3, 3, 3)
        weight[1, 2, 0, 1] = poison
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            _norm(weight, options)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"groups": 2}, "groups"),
        ({"input_size": 0}, "does not fit"),
        ({"input_size": 2, "padding": 0}, "does not fit"),
        ({"kernel": 0}, "does not fit"),
    ],
)
def test_impossible_geometry_is_refused(change: dict, match: str) -> None:
    options = {
        "stride": 1,
        "padding": 1,
        "dilation": 1,
        "groups": 1,
        "input_size": 8,
        "kernel": 3,
    } | change
    with pytest.raises(UsageError, match=match):
        _norm(torch.ones(3, 3, options.pop("kernel"), 3), options)


def test_other_numbers_of_dimensions_are_refused() -> None:
    for shape in ((3, 3), (2, 2, 3, 3, 3)):
        with pytest.raises(UsageError, match="dimensions"):
            conv_norm(torch.ones(shape), Geometry((1,), ((0, 0),), (1,), 1, (8,)))


@pytest.mark.parametrize("sizes", [(1, 1), (4, 6), (6, 4), (5, 7), (7, 5), (1, 8), (8, 1)])
def test_half_of_the_frequencies_and_their_mirrors_are_all(sizes: tuple[int, int]) -> None:
    axes = [SimpleNamespace(torus=size) for size in sizes]
    half = torch.cat(list(convolution._frequency_chunks(axes, 2**20, torch.device("cpu"))))  # type: ignore[arg-type]
    found = {tuple(pair) for pair in half.tolist()} | {
        tuple(pair) for pair in (-half % torch.tensor(sizes)).tolist()
    }
    assert len(found) == sizes[0] * sizes[1]


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_only_a_padding_of_zeros_is_one_of_zeros(mode: str) -> None:
    assert not pads_with_zeros(torch.nn.Conv2d(1, 1, 3, padding=1, padding_mode=mode))
    assert not pads_with_zeros(torch.nn.Conv2d(1, 1, 3, padding=(0, 1), padding_mode=mode))
    assert pads_with_zeros(torch.nn.Conv2d(1, 1, 3, padding=0, padding_mode=mode))
    assert pads_with_zeros(torch.nn.Conv2d(1, 1, 3, padding=1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_torus_lies_above_the_dense_matrix(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_the_torus(monkeypatch)
    weight = _weight(name, kind)
    options = _options(name)
    bound = _norm(weight, options)
    assert bound >= _dense_norm(weight, options) * (1.0 - ORACLE)
