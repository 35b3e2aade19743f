"""Weights shared out among processes: each keeps its rows of every weight, of its gradient and of its optimiser state.

What a pass needs is gathered block by block and let go again (PyTorch's FSDP2, `fully_shard`). A sharded parameter is a
DTensor whose rows are dealt as `torch.chunk` deals them; here it is met by `own` (the rows held by this process, sharing
their memory) and by `Rows` (a copy of them that knows the shape of the whole).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.finetune.settings import FinetuneSettings
from certcli.models.build import PixelModel, keep_float32
from certcli.system.errors import ArchitectureError, UsageError, one_line
from certcli.system.processes import Team

OPTION = "--shard-weights"
OPTIMISERS = ("adamw", "sgd")
"""Those whose step looks at each number of a weight by itself."""


@dataclass(frozen=True)
class Rows:
    """This process's rows of a tensor of `shape`, on the CPU."""

    rows: Tensor
    shape: torch.Size

    @property
    def like(self) -> Tensor:
        """The whole, without its numbers."""
        return torch.empty(self.shape, dtype=self.rows.dtype, device="meta")


Stored = Tensor | Rows


def require_shardable(settings: FinetuneSettings, team: Team) -> None:
    """UsageError for what reads whole matrices: bounds, penalties on norms, projections, Stiefel steps."""
    if not team.several:
        raise UsageError(
            f"{OPTION} shares the weights out among processes, and there is one",
            "torchrun --nproc-per-node N -m certcli finetune ...",
        )
    wrong = {
        f"--loss {settings.loss}": settings.loss != "ce",
        f"--optimiser {settings.optimiser}": settings.optimiser not in OPTIMISERS,
        "--msvp": settings.msvp is not None,
        f"--project {settings.project}": settings.project is not None,
        f"--augment {','.join(settings.hiding)}": bool(settings.hiding),
    }
    for option, needs_whole in wrong.items():
        if needs_whole:
            hint = (
                f"--loss ce with --optimiser {' or '.join(OPTIMISERS)}; or each process holds all weights: no {OPTION}"
            )
            raise UsageError(f"{option} reads whole matrices: not with {OPTION}", hint)
    if settings.precision == "fp16":
        raise UsageError(f"--precision fp16 scales gradients as a whole: not with {OPTION}", "--precision bf16")


def share_out(model: PixelModel, device: torch.device, team: Team, precision: str = "float32") -> None:
    """Shard every block and what is left beside the blocks; onto `device`, block by block.

    Each process copies its own rows alone: of weights that are mapped from a file no more is read. With bf16 what is
    gathered are bfloat16 copies, and what is kept, and added up, is float32. Errors: ArchitectureError for a network whose
    weights cannot be dealt so.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _require_rows(model.net)
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
    for part in [*blocks(model.net), model.net]:
        part.register_forward_hook(_no_view)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.normalize.to(device)
    _require_called(model, device, precision)


def _no_view(module: nn.Module, given: Any, output: Any) -> Any:
    """Operations in place on a view would lose what gathers the block again on the way back (windows of Swin)."""
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def blocks(net: nn.Module) -> list[nn.Module]:
    """The members of lists of modules that are no single layers, inner ones first: transformer blocks, stages."""
    lists = (module for module in net.modules() if isinstance(module, (nn.Sequential, nn.ModuleList)))
    found = {member: None for group in lists for member in group if next(member.children(), None) is not None}
    kept = [member for member in found if not isinstance(member, (nn.Sequential, nn.ModuleList))]
    return [member for member in reversed(kept) if next(member.parameters(), None) is not None]


def _require_average(team: Team, device: torch.device) -> None:
    """UsageError where this PyTorch cannot deal averages on such a device, as an older gloo cannot."""
    given = torch.zeros(team.size, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # renamed in 2.13, in which both names are there
            team.group().reduce_scatter_tensor(given.new_empty(1), given, op=team.group().ReduceOp.AVG)
    except (RuntimeError, ValueError, NotImplementedError) as failure:
        raise UsageError(
            f"{OPTION}: PyTorch {torch.__version__} cannot share gradients out on {device.type} ({one_line(failure)})",
            f"a newer PyTorch, or GPUs; or leave {OPTION} out",
        ) from failure


def _require_rows(net: nn.Module) -> None:
    named = list(net.named_parameters(remove_duplicate=False))
    if len({id(parameter) for _, parameter in named}) < len(named):
        raise ArchitectureError(f"{OPTION}: two parts of the network share a weight", f"leave {OPTION} out")
    for name, parameter in named:
        if parameter.dim() == 0:
            raise ArchitectureError(
                f"{OPTION}: the weight '{name}' is a single number, of which there are no rows", f"leave {OPTION} out"
            )


def _require_called(model: PixelModel, device: torch.device, precision: str) -> None:
    """ArchitectureError where a block's weights are read past its call, which is when they are gathered."""
    weight = next(model.parameters())
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            model(torch.zeros(1, *model.input_size, dtype=weight.dtype, device=device))
    except (RuntimeError, TypeError, AssertionError) as failure:
        if any(word in f"{type(failure).__name__} {failure}" for word in ("gloo", "NCCL", "Dist")):
            raise  # another process is gone
        raise ArchitectureError(
            f"{OPTION}: the network does not run with its weights shared out ({one_line(failure)})",
            f"leave {OPTION} out",
        ) from failure
    let_go(model.net)


def is_sharded(value: Tensor) -> bool:
    return hasattr(value, "to_local")


def own(value: Tensor) -> Tensor:
    """This process's rows of a sharded tensor, sharing their memory; any other tensor as it is."""
    return value.detach().to_local() if is_sharded(value) else value  # type: ignore[attr-defined]


def let_go(net: nn.Module) -> None:
    """What a pass without gradients gathered and keeps is given back: the next one gathers the weights as they are then."""
    from torch.distributed.fsdp import FSDPModule

    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def kept(value: Tensor) -> Stored:
    """A copy on the CPU; of a sharded tensor, of this process's rows."""
    copy = own(value).detach().cpu().clone()
    return Rows(copy, value.shape) if is_sharded(value) else copy


def kept_of(value: Tensor, stored: Stored, team: Team) -> Stored:
    """The same of numbers that were stored for `value`, whole or as rows."""
    if isinstance(stored, Rows) or not is_sharded(value):
        return stored
    return Rows(_rows(stored, team).clone(), value.shape)


@torch.no_grad()
def put(value: Tensor, stored: Stored, team: Team) -> None:
    """`value` becomes what is stored for it, whole or as rows. RuntimeError where the shapes differ."""
    if stored.shape != value.shape:
        raise RuntimeError(f"{tuple(stored.shape)} is stored where {tuple(value.shape)} is expected")
    here = own(value)
    if isinstance(stored, Rows):
        here.copy_(stored.rows)
    else:
        here.copy_(_rows(stored, team) if is_sharded(value) else stored)


def _rows(whole: Tensor, team: Team) -> Tensor:
    most = -(-len(whole) // team.size)
    return whole[team.rank * most : (team.rank + 1) * most]


def whole(stored: Mapping[str, Stored], team: Team, keep: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The tensors of which each process stored its rows, one after the other, for the leader; nothing for the others.

    keep: what the leader does with each before the next one comes.
    """
    found: dict[str, Tensor] = {}
    for name, value in stored.items():
        tensor = team.join(value.rows, value.shape) if isinstance(value, Rows) else value
        if tensor is not None and team.leads:
            found[name] = keep(tensor) if isinstance(value, Rows) else tensor
    return found


class Shares:
    """What an optimiser moves in place of sharded parameters: this process's rows as plain tensors, in the same memory."""

    def __init__(self, parameters: Iterable[nn.Parameter], team: Team) -> None:
        self.team = team
        self.parameters = list(parameters)
        self.rows = [own(parameter).requires_grad_(True) for parameter in self.parameters]

    def forget(self) -> None:
        for parameter, rows in zip(self.parameters, self.rows, strict=True):
            parameter.grad = rows.grad = None

    def collect(self) -> None:
        """Gradients, which the backward pass added up over the processes and dealt, are handed to the rows."""
        for parameter, rows in zip(self.parameters, self.rows, strict=True):
            rows.grad = None if parameter.grad is None else own(parameter.grad)

    def length(self, parts: Iterable[Tensor]) -> Tensor:
        """The l2 norm of tensors of which each process holds rows: ()."""
        squares = [part.norm().double() ** 2 for part in parts]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        self.team.add_up([total])
        return total.sqrt().float()

    @torch.no_grad()
    def clip(self, longest: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, of all rows of all processes."""
        gradients = [rows.grad for rows in self.rows if rows.grad is not None]
        factor = (longest / (self.length(gradients) + 1e-6)).clamp_max(1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))

    def stored(self, state: dict[str, Any]) -> dict[str, Any]:
        """An optimiser's state in which every tensor of rows knows the shape of the whole."""
        return self._changed(state, lambda tensor, like: Rows(tensor.detach().cpu(), like.shape))

    def own_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """This process's part of an optimiser's state with whole tensors. RuntimeError where it is another network's."""

        def part(tensor: Tensor, like: Tensor) -> Tensor:
            if tensor.shape != like.shape:
                raise RuntimeError(f"{tuple(tensor.shape)} is stored where {tuple(like.shape)} is expected")
            return _rows(tensor, self.team).clone()

        return self._changed(state, part)

    def _changed(self, state: dict[str, Any], change: Callable[[Tensor, Tensor], Any]) -> dict[str, Any]:
        """The state with each tensor changed that belongs to a weight, given that weight; step counters stay."""
        entries = {
            index: {
                name: change(value, self.parameters[index]) if isinstance(value, Tensor) and value.dim() > 0 else value
                for name, value in values.items()
            }
            for index, values in state["state"].items()
        }
        return {**state, "state": entries}
