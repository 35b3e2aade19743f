"""Small nets, images and exact distances, shared by the tests of attacks."""

import torch
from torch import Tensor, nn

from certcli.attack.catalogue import ATTACKS
from certcli.attack.settings import AttackSettings
from certcli.evaluation.perturbation import Norm
from tests.helpers.lipschitz_cases import f

NORMS: tuple[Norm, ...] = ("l2", "linf")
GENERAL = [attack.name for attack in ATTACKS if not attack.needs_attention]
CASES = [(name, norm) for name in GENERAL for norm in ATTACKS[name].norms]
SHORT = AttackSettings(steps=6, queries=20, searches=2, targets=4)
# Float32 logits of size 1 carry errors of some 1e-7, the margins here are of size 0.1: a boundary
# may be off by 1e-5.
ROUNDING = 1e-5


def linear_classifier(classes: int, seed: int = 0, size: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, classes)).eval()


def small_perceptron(classes: int, seed: int = 0, size: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    pixels = size * size
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 24), nn.ReLU(), nn.Linear(24, classes)
    ).eval()


def small_convolution(classes: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)
    )
    return nn.Sequential(body, nn.Linear(24, classes)).eval()


MODELS = {
    "perceptron-2": small_perceptron(2),
    "perceptron-3": small_perceptron(3),
    "perceptron-12": small_perceptron(12),
    "convolution-4": small_convolution(4),
}


def labelled(model: nn.Module, images: Tensor, wrong: int = 0) -> Tensor:
    """The model's own classes, the first `wrong` of them changed."""
    with torch.no_grad():
        logits = model(images)
    labels = logits.argmax(dim=1)
    labels[:wrong] = (labels[:wrong] + 1) % logits.shape[1]
    return labels


def random_pictures(count: int, seed: int = 1, size: int = 6) -> Tensor:
    return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(seed))


def batches(images: Tensor, labels: Tensor, size: int = 5) -> list[tuple[Tensor, Tensor, Tensor]]:
    indices = torch.arange(len(images))
    return list(zip(indices.split(size), images.split(size), labels.split(size), strict=True))


def exact_distances(model: nn.Module, images: Tensor, labels: Tensor, norm: Norm) -> Tensor:
    """min |d| over x + d in the box with an argmax other than y, for the linear model: (b,),
    float64.

    For a target j it is min |d| with a.d >= m, a = w_j - w_y. By Lagrange the l2 optimum is clip(t
    a), the linf optimum clip(t sign a), clipped to the box; a.d grows with t, so t is found by
    bisection.
    """
    weight = model[1].weight.detach().double()
    bias = model[1].bias.detach().double()
    flat = images.double().flatten(1)
    logits = flat @ weight.T + bias
    slope = weight[None] - weight[labels][:, None]  # (b, k, n), and 0 for the true class
    needed = logits.gather(1, labels[:, None]) - logits  # (b, k)
    direction = slope if norm == "l2" else slope.sign()

    def moved(length: Tensor) -> Tensor:
        return (flat[:, None] + length[:, :, None] * direction).clamp(0, 1) - flat[:, None]

    low = torch.zeros_like(needed)
    high = torch.full_like(needed, 1e3)
    for _ in range(80):
        middle = (low + high) / 2
        enough = (moved(middle) * slope).sum(dim=2) >= needed
        low = torch.where(enough, low, middle)
        high = torch.where(enough, middle, high)
    delta = moved(high)
    length = delta.norm(dim=2) if norm == "l2" else delta.abs().amax(dim=2)
    reached = (delta * slope).sum(dim=2) >= needed * (1 - 1e-9)
    other = torch.arange(len(weight)) != labels[:, None]
    return torch.where(reached & other, length, float("inf")).amin(dim=1)


def scaled_logits(factor: float, classes: int = 4) -> nn.Module:
    """Return a net of logits * factor: at 1e4 the softmax is exactly 1 in float32, and the gradient
    of the cross entropy exactly 0.
    """
    return f(lambda m, images: m.parts[0](images) * factor, small_perceptron(classes))


def hole_around(target: Tensor, width: float) -> nn.Module:
    """Return logits (0, width - |x - target|_2): the second class within `width` of one image."""

    def forward(net: nn.Module, images: Tensor) -> Tensor:
        distance = (images - net.target).flatten(1).norm(dim=1)
        return torch.stack([torch.zeros_like(distance), width - distance], dim=1)

    return f(forward, target=target)


def unreached_favourite() -> nn.Module:
    """Return logits (0, -.1 - .01 s, -1 + 2 t), s and t the way along two orthogonal directions:
    the likeliest wrong class is never reached, the second one is at t = .5.
    """

    def forward(net: nn.Module, images: Tensor) -> Tensor:
        way = (images - 0.5).flatten(1)
        along = way[:, ::2].sum(dim=1) / way[:, ::2].shape[1] ** 0.5
        across = way[:, 1::2].sum(dim=1) / way[:, 1::2].shape[1] ** 0.5
        return torch.stack([0 * along, -0.1 - 0.01 * along.abs(), -1 + 2 * across], dim=1)

    return f(forward)


def on_stairs() -> nn.Module:
    """Return x -> z(round(4 x) / 4), whose gradient is 0: an FGSM trap for small steps."""
    return f(lambda m, images: m.parts[0]((4 * images).round() / 4), small_perceptron(4))
