"""A network that reads the image's numbers behind torch's back has no bound, however it reads them."""

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _mode_utils
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode_temporarily

from certcli.engine import watched_run
from certcli.engine.tracer import Untraceable
from certcli.engine.watched_run import followed, shadowed
from certcli.lipschitz.network import bound_network

SIZE = (1, 2, 2)


def by_copy(x: Tensor) -> float:
    return float(copy.deepcopy(x).sum())


def by_copy_beside_a_weight(x: Tensor) -> float:
    return float(copy.deepcopy([torch.zeros(1), x])[1].sum())


def by_storage(x: Tensor) -> float:
    return float(x.untyped_storage()[0])


def by_repr(x: Tensor) -> float:
    return float(repr(x.flatten()[0]).split("(")[1].split(",")[0].rstrip(")"))


def by_thread(x: Tensor) -> float:
    sums: list[float] = []
    thread = threading.Thread(target=lambda: sums.append(float(x.sum())))
    thread.start()
    thread.join()
    return sums[0]


def without_modes(x: Tensor) -> float:
    with _disable_current_modes():
        return float(x.sum())


def without_the_innermost_mode(x: Tensor) -> float:
    with _pop_mode_temporarily():
        return float(x.sum())


def without_dispatch(x: Tensor) -> float:
    with torch._C._DisableTorchDispatch():
        return float(x.sum())


def without_functions(x: Tensor) -> float:
    with torch._C.DisableTorchFunction():
        return float(x.sum())


READERS = (
    by_copy,
    by_copy_beside_a_weight,
    by_storage,
    by_repr,
    by_thread,
    without_modes,
    without_the_innermost_mode,
    without_dispatch,
    without_functions,
)


class Reading(nn.Module):
    """Fifty times as steep where the image's number lies in a gap that no probe meets.

    It catches what goes wrong, and reads tensors alone: what traces it shows it something else.
    """

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.read = read
        self.num_classes = 2
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        number = 0.0
        if isinstance(x, Tensor):
            try:
                number = self.read(x)
            except Exception:
                number = 0.0
        factor = 50.0 if 0.7 < number < 0.71 else 1.0
        return self.fc(factor * x.flatten(1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_number_that_is_read_behind_torch_has_no_bound(read: Callable[[Tensor], float]) -> None:
    torch.manual_seed(0)
    bound = bound_network(Reading(read).double().eval(), SIZE, 2).bound
    assert not bound.value.finite
    assert "reads a tensor's value" in bound.why


def test_the_guard_is_given_back() -> None:
    guard = torch._C._DisableTorchDispatch
    bound_network(Reading(without_dispatch).double().eval(), SIZE, 2)
    assert torch._C._DisableTorchDispatch is guard


def held_by_a_closure() -> Callable[[Tensor], float]:
    guard = torch._C._DisableTorchDispatch

    def read(x: Tensor) -> float:
        with guard():
            return float(x.sum())

    return read


def held_by_a_default() -> Callable[[Tensor], float]:
    def read(x: Tensor, guard: type = torch._C._DisableTorchDispatch) -> float:
        with guard():
            return float(x.sum())

    return read


def held_by_a_module() -> Callable[[Tensor], float]:
    place: dict[str, object] = {"guard": torch._C._DisableTorchDispatch, "__name__": "network"}
    exec("def read(x):\n    with guard():\n        return float(x.sum())", place)
    read: Callable[[Tensor], float] = place["read"]  # type: ignore[assignment]
    return read


def in_the_place_of_torchs() -> Callable[[Tensor], float]:
    """As many refer to the guard as before."""
    del _mode_utils.no_dispatch
    return held_by_a_closure()


def named_in_a_module_of_torch_twice() -> Callable[[Tensor], float]:
    sys.modules["torch.once_more"] = _mode_utils
    return held_by_a_closure()


def beside_a_module_that_shows_another_namespace() -> Callable[[Tensor], float]:
    class Shows(ModuleType):
        __dict__ = property(  # type: ignore[assignment]
            lambda self: {"__name__": "torch.shown", "guard": torch._C._DisableTorchDispatch}
        )

    sys.modules["torch.shown"] = Shows("network")
    return held_by_a_closure()


@pytest.fixture
def torch_as_it_is() -> Iterator[None]:
    """Give back what a reader takes from torch, and forget what it adds."""
    yield
    _mode_utils.no_dispatch = torch._C._DisableTorchDispatch
    for name in ("torch.once_more", "torch.shown"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("torch_as_it_is")
@pytest.mark.parametrize(
    "make",
    [
        held_by_a_closure,
        held_by_a_default,
        held_by_a_module,
        in_the_place_of_torchs,
        named_in_a_module_of_torch_twice,
        beside_a_module_that_shows_another_namespace,
    ],
)
def test_a_guard_that_was_taken_before_the_run_is_refused(
    make: Callable[[], Callable[[Tensor], float]],
) -> None:
    """Used in the run, it would end the process."""
    torch.manual_seed(0)
    bound = bound_network(Reading(make()).double().eval(), SIZE, 2).bound
    assert not bound.value.finite
    assert "_DisableTorchDispatch" in bound.why
    assert bound_network(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval(), SIZE, 2).upper.finite


def test_all_objects_are_looked_at_only_where_more_refer_to_the_guard_than_torch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def walk(*_: object) -> list[object]:
        raise AssertionError

    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    monkeypatch.setattr(watched_run.gc, "get_referrers", walk)
    assert bound_network(net, SIZE, 2).upper.finite
    read = held_by_a_closure()
    assert not bound_network(net, SIZE, 2).upper.finite
    del read
    assert bound_network(net, SIZE, 2).upper.finite


def copied_in(room: Tensor, x: Tensor) -> None:
    room[:, :, 0].copy_(x[:, :, 0])


def computed_in(room: Tensor, x: Tensor) -> None:
    torch.mul(x, 2.0, out=room)


@pytest.mark.parametrize("write", [copied_in, computed_in])
def test_memory_that_was_made_from_shapes_is_read_until_the_image_is_written_there(
    write: Callable[[Tensor, Tensor], None],
) -> None:
    def reads(x: Tensor) -> float:
        room = x.new_zeros(x.shape)
        assert float(room.sum()) == 0.0
        write(room, x)
        return float(room.sum())

    with pytest.raises(Untraceable, match="reads a tensor's value"):
        shadowed(reads, torch.rand(1, *SIZE))


def test_an_image_without_memory_looks_like_an_ordinary_one() -> None:
    """Else a network that looks would be another one there."""

    def look(x: Tensor) -> list[object]:
        parts = [x, x.flatten(1)[:, 1:], x.movedim(1, 3), x.float(), x > 0.5]
        return [
            (y.shape, y.stride(), y.storage_offset(), y.dtype, y.layout, y.device, y.requires_grad)
            for y in parts
        ]

    image = torch.rand(2, *SIZE).double()
    assert shadowed(look, image)[0] == look(image) == followed(look, image)[0]


def test_an_image_without_memory_loads_no_distributed_tensors() -> None:
    """Else every proof began 0.9 s later."""
    code = (
        "import sys, torch\n"
        "from certcli.engine.watched_run import shadowed\n"
        "shadowed(lambda x: (x + 1).relu(), torch.rand(1, 3))\n"
        "sys.exit('torch.distributed.tensor' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
