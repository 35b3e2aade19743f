"""Statistics made part by part go on where the part before stopped: the same to the bit, and every
block runs about once.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from certcli.constrain.resumed_forward import BEFORE, Trunk
from tests.helpers.constrain_layers import collect

WIDTH = 8
BLOCKS = 6
IMAGES = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(3))
LIMIT = 8 * WIDTH * WIDTH  # a layer's


def block() -> nn.Sequential:
    """Writes into what it is given."""
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)))


class HeadFirst(Stem):
    """Registered in another order than called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = self.stem, self._modules.pop("blocks")  # type: ignore[assignment]


class StemAgain(Stem):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stem(self.blocks(self.stem(images))))


class Backwards(Stem):
    def forward(self, images: Tensor) -> Tensor:
        value = self.stem(images)
        for part in reversed(self.blocks):
            value = part(value)
        return self.head(value)


class Twice(Stem):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.blocks(self.stem(images))))


class Beside(Stem):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)) + self.blocks[2](images.clone()))


class Shared(Stem):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = self.blocks[1]


class Turned(nn.Sequential):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.flip(-1)).flip(-1)


class Own(Stem):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = Turned(*self.blocks)


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


ROWS: dict[
    str, tuple[Callable[[], nn.Module], int]
] = {  # 0: no trunk, else at most so many runs of each layer
    "vit": (Stem, 2),
    "head first": (HeadFirst, 3),
    "stem again": (StemAgain, 3),
    "a chain": (chain, 2),
    "backwards": (Backwards, 0),
    "twice": (Twice, 0),
    "a block beside": (Beside, 0),
    "a block again": (Shared, 14),  # a trunk of one block only
    "own forward": (Own, 14),
}


@pytest.mark.parametrize(("build", "runs"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("most", [1, 3], ids=["a layer at a time", "three layers"])
def test_parts_of_the_layers_are_gathered_in_one_run(
    build: Callable[[], nn.Module], runs: int, most: int
) -> None:
    torch.manual_seed(0)
    net = build().eval()
    calls: Counter[str] = Counter()
    paths = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)]
    for path in paths:
        net.get_submodule(path).register_forward_hook(lambda *_, path=path: calls.update([path]))
    batches = IMAGES.split(4)
    whole = collect(net, batches, paths, held_out_batches=IMAGES[:2].split(1))
    once = sum(calls.values())
    calls.clear()
    limit = 2 * most * LIMIT
    parts = collect(
        net, batches, paths, memory_limit_bytes=limit, held_out_batches=IMAGES[:2].split(1)
    )
    assert list(parts) == list(whole)
    for path, layer in parts.items():
        assert torch.equal(layer.gram, whole[path].gram)
        held_out = layer.held_out
        there = whole[path].held_out
        assert held_out is not None
        assert there is not None
        assert torch.equal(held_out, there)
    assert (Trunk.of(net, batches, paths) is None) == (runs == 0)
    # the block in which a part ends runs again; two runs of an image show where layers are called,
    # beside five batches
    if runs:
        assert sum(calls.values()) <= (runs + 2 / 5) * once
    assert "forward" not in vars(getattr(net, "blocks", net))


def test_where_layers_are_called() -> None:
    net = StemAgain().eval()
    trunk = Trunk.of(net, [IMAGES], ["stem", "head", "blocks.0.1", "blocks.5.2"])
    assert trunk is not None
    assert trunk.places == {
        "stem": (BEFORE, 6),
        "blocks.0.1": (0, 0),
        "blocks.5.2": (5, 5),
        "head": (6, 6),
    }
