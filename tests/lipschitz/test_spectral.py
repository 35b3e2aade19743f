"""Spectral norms as upper bounds: never below the SVD, barely above it, and honest about what they
refuse.
"""

import math
from fractions import Fraction

import pytest
import torch

from certcli.lipschitz.numerics import eigenvalues, outward, spectral
from certcli.lipschitz.numerics.eigenvalues import gram_iteration
from certcli.lipschitz.numerics.outward import frobenius_norm, gamma, up
from certcli.lipschitz.numerics.spectral import spectral_norm, spectral_norms
from certcli.system.errors import CheckpointError, UsageError


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _with_singular_values(values: torch.Tensor, columns: int) -> torch.Tensor:
    left, _ = torch.linalg.qr(_random(len(values), len(values), seed=1))
    right, _ = torch.linalg.qr(_random(columns, len(values), seed=2))
    return left * values @ right.mT


_INDEX = torch.arange(1.0, 61.0, dtype=torch.float64)
MATRICES = {
    "gaussian": _random(120, 90),
    "gaussian, large enough for Lanczos": _random(300, 280),
    "wide, several panels and column blocks": _random(400, 1100),
    "tall": _random(1100, 270),
    "orthogonal": torch.linalg.qr(_random(300, 300))[0],
    "rank one": torch.outer(_random(300), _random(290, seed=3)),
    "rank one, nonnegative": torch.outer(_random(40).abs(), _random(30, seed=3).abs()),
    "Hilbert": 1.0 / (_INDEX[:, None] + _INDEX[None, :] - 1.0),
    "nearly equal singular values": _with_singular_values(
        1.0 + 1e-9 * torch.rand(280, dtype=torch.float64), 300
    ),
    "cluster below the top": _with_singular_values(
        torch.linspace(0.9999, 1.0, 290, dtype=torch.float64), 300
    ),
    "wide spread": _with_singular_values(torch.logspace(0, -12, 280, dtype=torch.float64), 300),
    "1e-30": _random(70, 50) * 1e-30,
    "1e30": _random(70, 50) * 1e30,
    "largest floats": torch.full((3, 2), 1e307, dtype=torch.float64),
    "subnormal": torch.full((3, 2), 5e-324, dtype=torch.float64),
    "mixed scales": torch.diag(torch.tensor([1e300, 1.0, 1e-300], dtype=torch.float64)),
    "one entry": torch.tensor([[-3.0]], dtype=torch.float64),
    "one row": _random(1, 50),
    "one column": _random(50, 1),
    "two by two": torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64),
    "float32": _random(64, 48).float(),
    "float16": _random(64, 48).half(),
    "bfloat16": _random(48, 64).bfloat16(),
    "not contiguous": _random(64, 96)[::2, ::3],
    "padded with zeros": torch.nn.functional.pad(_random(30, 30), (20, 20, 20, 20)),
}


def _reference(matrix: torch.Tensor) -> float:
    """Largest singular value from the SVD, scaled first so that it neither overflows nor
    underflows.
    """
    exponent = math.frexp(float(matrix.double().abs().max()))[1]
    half = -exponent // 2
    scaled = matrix.double() * 2.0**half * 2.0 ** (-exponent - half)
    return math.ldexp(float(torch.linalg.svdvals(scaled)[0]), exponent)


# LAPACK's own error in the SVD, an upper estimate at these sizes; the bound is proven, the oracle
# is rounded.
ORACLE = 1e-14
# Promised in spectral_norm's docstring: 1e-6, relatively, where the certificate succeeds, as it
# does on every row here.
LOOSENESS = 1e-6


@pytest.mark.parametrize("name", MATRICES)
def test_bound_lies_above_the_svd_and_close_to_it(name: str) -> None:
    reference = _reference(MATRICES[name])
    for matrix in (MATRICES[name], -MATRICES[name].mT):
        bound = spectral_norm(matrix)
        assert bound >= reference * (1.0 - ORACLE)
        assert (
            bound <= reference * (1.0 + LOOSENESS) + 5e-324
        )  # a subnormal value is rounded up by whole subnormals


@pytest.mark.parametrize("power", [-900, -3, 40, 900])
def test_scaling_by_a_power_of_two_scales_the_bound_exactly(power: int) -> None:
    matrix = _random(40, 30)
    assert spectral_norm(matrix * 2.0**power) == math.ldexp(spectral_norm(matrix), power)


def test_exact_arithmetic_on_integers_is_not_undercut() -> None:
    """sigma([[3, 4], [0, 0]]) = 5 and sigma(ones(9, 16)) = 12 exactly: a bound rounded down would
    show here.
    """
    assert spectral_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]])) >= 5.0
    assert spectral_norm(torch.ones(9, 16)) >= 12.0
    assert frobenius_norm(torch.tensor([3.0, 4.0])) >= 5.0
    assert frobenius_norm(torch.ones(12, 12)) >= 12.0


@pytest.mark.parametrize("shape", [(4, 3), (0, 3), (3, 0), (1, 5), (300, 300)])
def test_zero_is_exactly_zero(shape: tuple[int, int]) -> None:
    assert spectral_norm(torch.zeros(shape)) == 0.0
    assert frobenius_norm(torch.zeros(shape)) == 0.0


def test_norm_beyond_float64_is_infinite() -> None:
    assert spectral_norm(torch.full((4, 4), 1.7e308, dtype=torch.float64)) == math.inf
    assert frobenius_norm(torch.full((4, 4), 1.7e308, dtype=torch.float64)) == math.inf


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm", [spectral_norm, frobenius_norm])
@pytest.mark.parametrize("shape", [(1, 4), (5, 4), (300, 260)])
def test_poisoned_weights_are_refused(norm, poison: float, shape: tuple[int, int]) -> None:
    matrix = torch.ones(shape)
    matrix[0, 2] = poison
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        norm(matrix)


def test_wrong_shapes_dtypes_and_errors_are_refused() -> None:
    for bad in (torch.zeros(3), torch.zeros(2, 2, 2), torch.ones(2, 2, dtype=torch.int64)):
        with pytest.raises(UsageError):
            spectral_norm(bad)
    for error in (-1.0, math.nan):
        with pytest.raises(UsageError):
            spectral_norm(torch.ones(2, 2), error)
    with pytest.raises(UsageError):
        spectral_norms([torch.ones(2, 2)], [0.0, 0.0])


def test_error_of_the_matrix_is_added_upwards() -> None:
    matrix = _random(20, 30)
    worst = matrix + 0.01 * torch.outer(*(vectors[:, 0] for vectors in _top_vectors(matrix)))
    assert spectral_norm(matrix, 0.01) >= _reference(worst) * (1.0 - ORACLE)
    assert spectral_norm(matrix, 0.01) > spectral_norm(matrix)
    assert spectral_norm(torch.zeros(2, 2), 0.5) >= 0.5
    assert spectral_norm(matrix, math.inf) == math.inf


def _top_vectors(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, right.mT


def test_batch_agrees_with_single_matrices_whatever_is_mixed_in() -> None:
    """Equal up to the rounding that both bounds already contain: batches take another order of
    summation.
    """
    matrices = [_random(12, 40, seed=seed) for seed in range(5)]
    matrices += [
        torch.zeros(12, 40, dtype=torch.float64),
        matrices[0].float(),
        matrices[1] * 1e200,
        _random(7, 3),
    ]
    matrices += [_random(1, 9), matrices[2].mT, _random(280, 270)]
    together = spectral_norms(matrices)
    for matrix, bound in zip(matrices, together):
        assert bound == pytest.approx(spectral_norm(matrix), rel=1e-8)
        assert bound >= (_reference(matrix) if matrix.any() else 0.0) * (1.0 - ORACLE)
    assert spectral_norms([]) == []


@pytest.mark.parametrize("name", ["gaussian", "orthogonal", "Hilbert", "cluster below the top"])
@pytest.mark.parametrize("relative", [-0.5, -1e-3, -1e-9])
def test_certificate_is_not_given_below_the_truth(name: str, relative: float) -> None:
    """The proof is what protects: a shift below the top eigenvalue must fail, or return a value
    above the truth.
    """
    matrix = MATRICES[name]
    gram = (matrix @ matrix.mT).unsqueeze(0)
    top = float(torch.linalg.eigvalsh(gram)[0, -1])
    assert eigenvalues.certify_below(gram, [top * (1.0 + relative)])[0] >= top * (1.0 - 1e-13)


def test_of_all_matrices_the_largest_bound_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = iter([[1.0, 3.0], [2.0]])
    monkeypatch.setattr(eigenvalues, "certify_below", lambda grams, shifts: next(bounds))
    chunks = iter([torch.zeros(2, 4, 4), torch.zeros(1, 4, 4)])
    assert eigenvalues.largest_of_chunks(chunks) == 3.0


def test_certificate_for_complex_matrices() -> None:
    half = torch.complex(_random(40, 60), _random(40, 60, seed=1))
    gram = (half @ half.mH).unsqueeze(0)
    top = float(torch.linalg.eigvalsh(gram)[0, -1])
    assert eigenvalues.certify_below(gram, [0.999 * top])[0] >= top
    assert top <= eigenvalues.certify_below(gram, [1.000001 * top])[0] <= 1.00001 * top


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_any_factor_proves_no_less_than_the_truth(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A = 3 v v*, s = 1, L L* = s (I - v v*): what is left is a rank one matrix, so the theorem
    says 3 and no more.
    """
    v = _random(400) if kind == "real" else torch.complex(_random(400), _random(400, seed=1))
    v = v / torch.linalg.vector_norm(v)
    line = torch.outer(v, v.conj())
    one = torch.eye(400, dtype=v.dtype)
    factor = torch.linalg.cholesky(one - line + 1e-9 * one)
    monkeypatch.setattr(
        torch.linalg,
        "cholesky_ex",
        lambda matrix: (factor[None], torch.zeros(1, dtype=torch.int32)),
    )
    assert 3.0 <= eigenvalues.certify_below((3 * line)[None], [1.0])[0] <= 3.01
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda matrix: (0 * matrix, torch.zeros(1, dtype=torch.int32))
    )
    assert eigenvalues.certify_below((3 * line)[None], [1.0])[0] >= 3.0


def test_rounding_counts_where_nothing_was_rounded() -> None:
    """s I - A and its factor are exact here, which a bound that holds for every library's sums
    cannot know.
    """
    shift = 2.0**-40  # so small that what is lost has 20 digits more
    gram = torch.diag(shift - torch.tensor([4.0, 9.0, 16.0], dtype=torch.float64))[None]
    shifted = math.sqrt(4**2 + 9**2 + 16**2)
    square = 4 + 9 + 16
    lost = Fraction(eigenvalues.certify_below(gram, [shift])[0]) - Fraction(shift)
    assert lost >= Fraction(gamma(4) * (shifted + square) + 2.0**-53 * shifted)
    assert lost <= Fraction(20 * gamma(4) * (shifted + square))


def test_lost_terms_count_in_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added one after another, n squares can be off by gamma_n of their sum."""
    monkeypatch.setattr(spectral, "top_eigenvalues", lambda grams: [2304.0])  # of ones(9, 1024) / 2
    wide = torch.ones(9, 1024) * 2.0**-4
    assert Fraction(spectral_norm(wide)) ** 2 >= 36 * (1 + Fraction(1024 - 9, 2**53))
    for square in (torch.ones(4096), torch.ones(64, 64).double() * 1e-170):
        truth = sum(Fraction(t) ** 2 for t in square.flatten().tolist())
        assert Fraction(frobenius_norm(square)) ** 2 >= truth * (1 + Fraction(4095, 2**53))


def test_sums_that_lose_a_thousandth_are_still_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """n terms that lose n 2^-20 in place of n 2^-53: nothing but the terms for lost sums can make
    up for that.
    """
    for module in (eigenvalues, outward, spectral):
        monkeypatch.setattr(module, "gamma", lambda terms: terms * 2.0**-20)
    monkeypatch.setattr(spectral, "top_eigenvalues", lambda grams: [0.0] * len(grams))
    for scale in (1.0, 1e-170):
        found = Fraction(frobenius_norm(torch.full((4096,), scale, dtype=torch.float64)))
        assert found**2 * (1 - Fraction(4096, 2**20)) >= 4096 * Fraction(scale) ** 2
    for matrices in (
        [torch.ones(9, 64)],
        [torch.ones(9, 64), 5 * torch.ones(9, 64), torch.ones(9, 64)],
    ):
        for matrix, norm in zip(matrices, spectral_norms(matrices)):
            formed = float(matrix.square().sum()) / (1 - 64 * 2.0**-20) / (1 - 9 * 2.0**-20)
            assert norm**2 >= 64 * 2.0**-20 * formed * (1 - 1e-12)  # what the test itself rounds
    slack = 1 + 2 * (64**2 + 2) * 2.0**-20  # of a square of a norm
    least = 64**2 * (slack**0.5 + 64 * 2.0**-20 * slack)
    assert (
        least * (1 - 1e-12)
        <= gram_iteration(torch.ones(64, 64).double(), 1) ** 2
        <= least * (1 + 1e-12)
    )


@pytest.mark.parametrize("broken", ["guess too low", "guess not a number", "no eigenvalue solver"])
def test_bad_guesses_cost_tightness_but_never_the_proof(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = MATRICES["gaussian, large enough for Lanczos"]
    reference = _reference(matrix)
    yes = torch.ones(1, dtype=torch.bool)
    guess = torch.full(
        (1,), math.nan if broken == "guess not a number" else 1.0, dtype=torch.float64
    )
    monkeypatch.setattr(eigenvalues, "lanczos_guess", lambda grams: (guess, yes))
    if broken == "no eigenvalue solver":

        def fail(grams: torch.Tensor) -> torch.Tensor:
            raise torch.linalg.LinAlgError("did not converge")

        monkeypatch.setattr(torch.linalg, "eigvalsh", fail)
    bound = spectral_norm(matrix)
    assert bound >= reference * (1.0 - ORACLE)
    assert (
        bound <= reference * 1.001
    )  # twelve Gram steps: rank^(1 / 2^14) = 280^(1 / 16384) = 1.00034


@pytest.mark.parametrize("name", ["gaussian", "orthogonal", "rank one", "Hilbert"])
def test_gram_iteration_lies_above_the_truth(name: str) -> None:
    matrix = MATRICES[name] @ MATRICES[name].mT
    reference = _reference(matrix)
    assert (
        reference * (1.0 - ORACLE)
        <= gram_iteration(matrix)
        <= reference * 300 ** (1 / 8192) * 1.000001
    )


def test_rounding_constants() -> None:
    assert gamma(1000) < 1000 * 2.0**-53 * (1.0 + 1e-12)
    assert up(1.0) > 1.0
    assert up(1.0, 3) == 1.0 + 3 * 2.0**-52
    assert up(math.inf) == math.inf
    for terms in (1, 3, 2**30, 2**51):
        assert Fraction(gamma(terms)) * (1 - Fraction(terms, 2**53)) >= Fraction(terms, 2**53)
    with pytest.raises(UsageError):
        gamma(2**53)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_law_holds_on_a_gpu() -> None:
    names = [name for name in MATRICES if name != "not contiguous"]
    bounds = spectral_norms([MATRICES[name].cuda() for name in names])
    for name, bound in zip(names, bounds):
        assert bound >= _reference(MATRICES[name]) * (1.0 - ORACLE), name
