"""Sharded weights: each process keeps its rows of every weight, of its gradient and of its
optimiser state.

PyTorch's FSDP2 (`fully_shard`) gathers the weights block by block for a pass, and frees them again.
A sharded parameter is a DTensor, its rows dealt as `torch.chunk` deals them. `rows_here` gives this
process's rows in the same memory, `LocalRows` is a copy of them with the shape of the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.finetune.settings import FinetuneSettings
from certcli.models.build import keep_float32
from certcli.models.pixels import PixelModel
from certcli.system.errors import ArchitectureError, UsageError, one_line
from certcli.system.processes import Team

OPTION = "--shard-weights"
OPTIMISERS = ("adamw", "sgd")
"""Optimisers whose step treats each number of a weight by itself."""


@dataclass(frozen=True)
class LocalRows:
    """This process's rows of a tensor of `shape`, on the CPU."""

    rows: Tensor
    shape: torch.Size

    @property
    def like(self) -> Tensor:
        """Return a tensor of the whole's shape and dtype, without memory."""
        return torch.empty(self.shape, dtype=self.rows.dtype, device="meta")


Stored = Tensor | LocalRows


def require_shardable(settings: FinetuneSettings, team: Team) -> None:
    """Raise UsageError for settings that read whole matrices: bounds, norms, Stiefel steps."""
    if not team.several:
        raise UsageError(
            f"{OPTION} divides the weights among processes, and there is only one",
            "torchrun --nproc-per-node N --no-python certvit finetune ...",
        )
    wrong = {
        f"--loss {settings.loss}": settings.loss != "ce",
        f"--optimiser {settings.optimiser}": settings.optimiser not in OPTIMISERS,
        "--msvp": settings.msvp is not None,
        f"--augment {','.join(settings.hiding)}": bool(settings.hiding),
    }
    for option, needs_whole in wrong.items():
        if needs_whole:
            hint = f"--loss ce with --optimiser {' or '.join(OPTIMISERS)}; or each process holds all weights: no {OPTION}"
            raise UsageError(f"{option} reads whole matrices: not with {OPTION}", hint)


def share_out(
    model: PixelModel, device: torch.device, team: Team, precision: str = "float32"
) -> None:
    """Shard every block, then the rest of the network, onto `device`.

    Each process reads only its own rows of weights that are mapped from a file. With bf16 the
    gathered copies are bfloat16; the rows and the sums of gradients stay float32.

    Raises:
        ArchitectureError: the network's weights cannot be sharded.
        UsageError: this PyTorch cannot average on the device.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _require_divisible(model.net)
    team.group()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        keep_float32(device)  # the model comes from the CPU
    mesh = init_device_mesh(device.type, (team.size,))
    _require_average(team, device)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    policy = MixedPrecisionPolicy()
    if precision == "bf16":  # autocast stays on: it decides in which type each operation runs
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def without_view(module: nn.Module, inputs: Any, output: Any) -> Any:
        # an operation in place on a view (Swin's windows) would lose the hook that gathers the
        # block in the backward pass
        return output.clone() if isinstance(output, Tensor) and output._is_view() else output

    for part in [*gathered_blocks(model.net), model.net]:
        part.register_forward_hook(without_view)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.normalize.to(device)
    _require_called(model, device, precision)


def gathered_blocks(net: nn.Module) -> list[nn.Module]:
    """Return members of module lists with modules of their own (blocks, stages), inner first."""
    lists = (
        module for module in net.modules() if isinstance(module, (nn.Sequential, nn.ModuleList))
    )
    members = {
        member: None
        for group in lists
        for member in group
        if next(member.children(), None) is not None
    }
    whole = [member for member in members if not isinstance(member, (nn.Sequential, nn.ModuleList))]
    return [member for member in reversed(whole) if next(member.parameters(), None) is not None]


def _require_average(team: Team, device: torch.device) -> None:
    """Raise UsageError where this PyTorch cannot deal averages, as an older gloo cannot."""
    ranks = torch.zeros(team.size, device=device)
    try:
        with warnings.catch_warnings():
            # renamed in 2.13, in which both names are there
            warnings.simplefilter("ignore", FutureWarning)
            team.group().reduce_scatter_tensor(
                ranks.new_empty(1), ranks, op=team.group().ReduceOp.AVG
            )
    except (RuntimeError, ValueError, NotImplementedError) as failure:
        raise UsageError(
            f"{OPTION}: PyTorch {torch.__version__} cannot divide gradients on {device.type} "
            f"({one_line(failure)})",
            f"a newer PyTorch, or GPUs; or leave {OPTION} out",
        ) from failure


def _require_divisible(net: nn.Module) -> None:
    named = list(net.named_parameters(remove_duplicate=False))
    if len({id(parameter) for _, parameter in named}) < len(named):
        raise ArchitectureError(
            f"{OPTION}: two parts of the network share a weight", f"leave {OPTION} out"
        )
    for name, parameter in named:
        if parameter.dim() == 0:
            raise ArchitectureError(
                f"{OPTION}: the weight '{name}' is a single number, of which there are no rows",
                f"leave {OPTION} out",
            )


def _require_called(model: PixelModel, device: torch.device, precision: str) -> None:
    """Raise ArchitectureError where weights are read outside their block: a call gathers them."""
    weight = next(model.parameters())
    try:
        with (
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
        ):
            model(torch.zeros(1, *model.input_size, dtype=weight.dtype, device=device))
    except (RuntimeError, TypeError, AssertionError) as failure:
        if any(word in f"{type(failure).__name__} {failure}" for word in ("gloo", "NCCL", "Dist")):
            raise  # another process has ended
        raise ArchitectureError(
            f"{OPTION}: the network does not run with divided weights ({one_line(failure)})",
            f"leave {OPTION} out",
        ) from failure
    let_go(model.net)


def is_sharded(value: object) -> bool:
    return hasattr(value, "to_local")


def rows_here(value: Tensor) -> Tensor:
    """Return this process's rows of a sharded tensor, same memory; others as they are."""
    return value.detach().to_local() if is_sharded(value) else value  # type: ignore[attr-defined]


def let_go(net: nn.Module) -> None:
    """Free weights gathered by a pass without gradients: the next pass gathers new ones."""
    from torch.distributed.fsdp import FSDPModule

    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def stored_copy(value: Tensor) -> Stored:
    """Return a copy on the CPU; for a sharded tensor, of this process's rows."""
    copy = rows_here(value).detach().cpu().clone()
    return LocalRows(copy, value.shape) if is_sharded(value) else copy


def stored_like(value: Tensor, stored: Stored, team: Team) -> Stored:
    """Return `stored`, whole or rows, in the form that `stored_copy(value)` has."""
    if isinstance(stored, LocalRows) or not is_sharded(value):
        return stored
    return LocalRows(_rows_of_rank(stored, team).clone(), value.shape)


@torch.no_grad()
def copy_stored(value: Tensor, stored: Stored, team: Team) -> None:
    """Copy `stored`, whole or rows, into `value`. RuntimeError where the shapes differ."""
    if stored.shape != value.shape:
        raise RuntimeError(
            f"{tuple(stored.shape)} is stored where {tuple(value.shape)} is expected"
        )
    here = rows_here(value)
    if isinstance(stored, LocalRows):
        here.copy_(stored.rows)
    else:
        here.copy_(_rows_of_rank(stored, team) if is_sharded(value) else stored)


def _rows_of_rank(whole: Tensor, team: Team) -> Tensor:
    rows_each = -(-len(whole) // team.size)
    return whole[team.rank * rows_each : (team.rank + 1) * rows_each]


def gather_whole(
    stored: Mapping[str, Stored], team: Team, keep: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the whole tensors in the leader, gathered one after the other; an empty dict in the
    other processes.

    Args:
        keep: applied by the leader to each tensor before the next one comes.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in stored.items():
        tensor = team.join(value.rows, value.shape) if isinstance(value, LocalRows) else value
        if tensor is not None and team.leads:
            tensors[name] = keep(tensor) if isinstance(value, LocalRows) else tensor
    return tensors


def stored_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimiser's state with `LocalRows` in place of sharded tensors."""
    entries = {
        index: {
            name: stored_copy(value) if is_sharded(value) else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return {**state, "state": entries}


def load_optimiser(optimiser: torch.optim.Optimizer, state: dict[str, Any], team: Team) -> None:
    """Load a stored state: of sharded weights this process's rows."""
    parameters = [each for group in optimiser.param_groups for each in group["params"]]
    entries: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        entries[index] = dict(values)
        for name, value in values.items():
            if is_sharded(parameters[index]) and len(value.shape) > 0:
                entries[index][name] = torch.empty_like(parameters[index].detach())
                copy_stored(entries[index][name], value, team)
    optimiser.load_state_dict({**state, "state": entries})
