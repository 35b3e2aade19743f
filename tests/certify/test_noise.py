"""The noise of randomised smoothing: which bits are drawn, and that they are normal."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from certcli.certify.smoothing import noise

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
@pytest.mark.parametrize("purpose", [noise.CERTIFY, noise.TIMED])
def test_bits_are_philox_on_every_device(seed: int, purpose: int) -> None:
    """numpy's generator against torch's integers: two implementations of one function."""
    images = [0, 3, 2**40]
    samples = [5, 0, 123_456]
    fast = noise.words(seed, images, samples, 371, CPU, purpose)
    assert torch.equal(fast, noise.philox(seed, images, samples, 371, CPU, purpose))
    assert torch.equal(fast[:, :11], noise.words(seed, images, samples, 11, CPU, purpose))
    others = noise.words(seed, [*images, 0], [*samples[1:], 1, 2], 371, CPU, purpose)
    assert len({tuple(row) for row in [*fast.tolist(), *others.tolist()]}) == 7


def test_the_published_answer_of_philox() -> None:
    # Random123, kat_vectors: philox4x64 10, counter 0, key 0. numpy counts up before it draws.
    drawn = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4)
    assert [hex(word) for word in drawn] == [
        "0x16554d9eca36314c", "0xdb20fe9d672d0fdc", "0xd7e772cee186176b", "0x7e68b68aec7ba23b",
    ]  # fmt: skip


def test_noise_is_normal_and_belongs_to_image_and_sample() -> None:
    drawn = noise.normals(1, [4] * 40, range(40), (3, 41, 41), CPU)
    alone = noise.normals(1, [4], [17], (3, 41, 41), CPU)
    assert torch.equal(drawn[17], alone[0])
    flat = drawn.flatten().double().numpy()
    assert stats.kstest(flat, "norm").pvalue > 1e-4
    assert abs((flat**4).mean() - 3) < 5 * math.sqrt(96 / len(flat))
    correlation = np.corrcoef(drawn.flatten(1).double().numpy())[np.triu_indices(40, 1)]
    assert np.abs(correlation).max() < 6 / math.sqrt(3 * 41 * 41)
    assert float(drawn.abs().max()) > 3.9  # of 200,000 draws: P[no |z| above 3.9] < 1e-8
