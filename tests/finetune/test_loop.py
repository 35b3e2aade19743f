"""Training: orthogonal stays orthogonal, losses say what they mean, estimates approach the proof,
divergence is caught.
"""

import pytest
import torch

from certcli.checkpoint.file import Checkpoint
from certcli.finetune.loop import Trainer
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.stiefel import (
    RETRACT_EVERY,
    StiefelMuon,
    orthogonal_parameters,
    orthogonalise,
    orthogonalised_direction,
    polar_factor,
    retract,
)
from certcli.finetune.validation import Quality, evaluate
from certcli.models import build
from certcli.system.errors import NoBoundError
from tests.helpers.training import LIPSCHITZ, digit_sets, trainer_of


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (6, 1, 2, 2)])
def test_polar_factors_and_updates_stay_on_the_manifold(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(polar_factor(torch.randn(shape)))
    optimiser = StiefelMuon([weight], lr=0.05)
    target = torch.randn(shape)
    before = float((weight * target).sum().detach())
    for _ in range(30):
        optimiser.zero_grad()
        (-(weight * target).sum()).backward()
        optimiser.step()
    with torch.no_grad():
        assert float((weight * target).sum()) > before
        retract(weight, 6)
        flat = weight.reshape(shape[0], -1)
        small = flat @ flat.T if flat.shape[0] <= flat.shape[1] else flat.T @ flat
        # cubic Newton-Schulz converges to float32 rounding
        assert torch.allclose(small, torch.eye(len(small)), atol=1e-5)


SHAPES = [(8, 8), (12, 5), (5, 12), (8, 8), (5, 3, 2, 2)]


def descended(together: bool) -> list[torch.nn.Parameter]:
    """Return matrices after sixteen steps by one optimiser, or by one each."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    weights = [torch.nn.Parameter(polar_factor(each)) for each in drawn]
    groups = [weights] if together else [[weight] for weight in weights]
    optimisers = [StiefelMuon(group, lr=0.05) for group in groups]
    for _ in range(2 * RETRACT_EVERY):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        for optimiser in optimisers:
            optimiser.step()
    return weights


def test_matrices_of_one_shape_move_as_each_would_alone() -> None:
    for one, other in zip(descended(True), descended(False), strict=True):
        # float32 sums in two orders, through sixteen steps
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("fast", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 12, 5), (1, 160, 40), (1, 128, 128)], ids=str)
def test_directions_have_singular_values_near_one(
    shape: tuple[int, ...], fast: torch.dtype
) -> None:
    """The law on which the cheap retraction rests, in the precision of every machine, whichever
    this one would choose.
    """
    torch.manual_seed(2)
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    count = shape[-1]
    tangent = 1e-3 * left * torch.linspace(1.0, 0.2, count) @ right
    logits = orthogonalised_direction(tangent, fast).float()
    sizes = torch.linalg.svdvals(logits)
    # the quintic's own range is [0.68, 1.13] (Jordan et al.), bfloat16 adds some 1 %
    assert 0.6 < float(sizes.min()) <= float(sizes.max()) < 1.25
    polar = left @ right
    assert float((logits * polar).sum() / (logits.norm() * polar.norm())) > 0.97
    assert not orthogonalised_direction(torch.zeros(shape), fast).any()
    steep = (
        left * torch.logspace(0, -4, count) @ right
    )  # as in long runs, where few directions have large gradients
    assert float(torch.linalg.svdvals(orthogonalised_direction(steep, fast).float()).max()) < 1.25


def test_orthogonalise_gives_norm_one_and_spares_the_last_layer() -> None:
    net = build.load(build.initialise("certvit_lip_digits", LIPSCHITZ), writable=True).net
    last = net.head.out.weight.clone()
    orthogonalise(net)
    assert torch.equal(net.head.out.weight, last)
    for weight in orthogonal_parameters(net):
        assert (
            abs(float(torch.linalg.matrix_norm(weight.detach().flatten(1).double(), 2)) - 1) < 1e-6
        )


def test_under_noise_the_epoch_is_chosen_by_accuracy_under_that_noise(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clean accuracy falls and accuracy under noise rises: the later epoch is what smoothing needs."""
    shares = {0.0: iter([0.9, 0.5]), 0.25: iter([0.1, 0.8])}

    def judged(*_: object, noise: float = 0.0, **__: object) -> Quality:
        return Quality(next(shares[noise]), None, None)

    monkeypatch.setattr("certcli.finetune.validation.evaluate", judged)
    run = trainer_of(tiny, loss="ce", epochs=2, lr=0.01, noise=0.25, batch_size=128)
    epochs = list(run.run(*digit_sets(tiny, 256, 60)))
    assert [epoch.best for epoch in epochs] == [True, True]
    assert [epoch.noisy for epoch in epochs] == [0.1, 0.8]
    assert run.best_epoch == 2


def test_accuracy_under_noise_is_of_noisy_images_and_the_same_each_time(tiny: Checkpoint) -> None:
    _, validation = digit_sets(tiny, 1, 60)
    batches = []

    def network(pixels: torch.Tensor) -> torch.Tensor:
        batches.append(pixels)
        return torch.eye(10)[:1].expand(len(pixels), -1)

    device = torch.device("cpu")
    for noise in (0.0, 0.5, 0.5):
        evaluate(network, None, validation, 0.1, 32, device, noise=noise)
    clean, first, second = (torch.cat(batches[start : start + 2]) for start in (0, 2, 4))
    assert torch.equal(first, second)
    spread = float((first - clean).std())
    assert 0.45 < spread < 0.55  # 60 x 64 draws: 0.5 to 2 %
    assert not torch.equal((first - clean)[:28], (first - clean)[32:])


def test_noisy_images_pass_the_denoiser_in_training_and_in_the_choice(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Grey(torch.nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(pixels)

    inputs: list[torch.Tensor] = []
    for noise in (0.0, 0.25):
        settings = FinetuneSettings(loss="ce", optimiser="adamw", noise=noise)
        model = build.load(tiny, writable=True)
        run = Trainer(model, settings, 10, "test", denoiser=Grey())
        train, validation = digit_sets(tiny, 256, 60)
        batch = run.objective.prepare(train, torch.arange(8), 0.0)
        assert bool((batch.images == 0).all()) == (noise > 0)
        inputs.clear()
        monkeypatch.setattr(
            model.net, "forward", lambda x: (inputs.append(x), x.new_zeros(len(x), 10))[1]
        )
        run.evaluate(validation)
        grey = [bool((pixels == pixels[:1, :, :1, :1]).all()) for pixels in inputs]
        assert grey == ([False, True] if noise else [False])


def test_losses_that_need_a_bound_refuse_a_network_without_one() -> None:
    model = build.load(build.initialise("certvit_4c3f", {"img_size": 8}))
    model.net.hidden = torch.nn.Sequential(torch.nn.Hardshrink(), *model.net.hidden)
    with pytest.raises(NoBoundError, match="needs a bound"):
        Trainer(model, FinetuneSettings(), 10, "x")
