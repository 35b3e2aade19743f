"""Networks that no file holds: a module in memory, copied, then traced and bounded like a file's; and
the mean of trained networks, as one checkpoint.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from certcli.checkpoint.file import Checkpoint, require_weights
from certcli.checkpoint.record import MEAN, Record
from certcli.checkpoint.schema import require_pixel_statistics
from certcli.models import build, exported
from certcli.models.pixels import PixelModel, PixelNormalize, PixelResize, ResizedPixels
from certcli.models.program import program_digest
from certcli.models.weights import foreign_tensor, require_classifier, require_features
from certcli.nn.layers import FlatHead
from certcli.nn.lipschitz_networks import MOST_MEMBERS, mean_tensors
from certcli.system.errors import ArchitectureError, Refused, UsageError, one_line, raise_if

PREFIX = "module."
"""Of the architecture's name in the record: timm has no such architecture, so that no command builds another network."""

Statistics = float | Sequence[float]


def open_module(
    module: nn.Module,
    mean: Statistics | None = None,
    std: Statistics | None = None,
    input_size: tuple[int, int, int] | None = None,
    *,
    features: bool = False,
) -> build.OpenCheckpoint:
    """Copy a module, in eval mode, with its weights as they are; later changes of the module do not
    count.

    Args:
        module: Normalised images (b, c, h, w) -> logits or features (b, k), or what `build.load`
            returned.
        mean, std: Pixel statistics, one value or one a channel; those of timm's configuration where
            None.
        input_size: (c, h, w); that of timm's configuration where None.
        features: The module has no classifier: its outputs are features.

    Raises:
        UsageError: a statistic or the size is missing or invalid, or `features` is given for a
        classifier.
        ArchitectureError: the module cannot be copied, does not map such images to logits, or has
        no classifier.
        CheckpointError: a weight is not finite.
    """
    kind = type(module).__name__
    resized = None
    if _is_pixel_model(module):
        resized = module.resized
        input_size = input_size or module.input_size
        normalisation = module.normalize
        shift = normalisation.mean.flatten()
        scale = normalisation.std.flatten()
        # it takes pixels: the same function
        takes_pixels = not any(statistics_per_channel(mean) or ())
        takes_pixels &= {*(statistics_per_channel(std) or ())} <= {1.0}
        raise_if(
            not takes_pixels and not (_are(mean, shift) and _are(std, scale)),
            UsageError,
            f"the {kind} normalises its pixels itself",
            "give neither mean nor std, or the network without its first layer",
        )
        mean = shift.tolist()
        std = scale.tolist()
        module = module.net
    try:
        if exported.is_exported(module):
            net, size = exported.network_of_program(module)
            input_size = input_size or size
        else:
            net = copy.deepcopy(module).cpu().eval()
    except ArchitectureError:
        raise
    except Exception as failure:  # copying runs code of the module
        raise ArchitectureError(
            f"the {kind} cannot be copied: {one_line(failure)}",
            "torch's old spectral_norm and weight_norm are removed first: remove_spectral_norm(module.PART)",
        ) from failure
    state = net.state_dict()
    hidden = {name for name, _ in net.named_parameters(remove_duplicate=False)} - state.keys()
    hidden |= {name for name, value in state.items() if not isinstance(value, Tensor)}
    if hidden:
        raise ArchitectureError(
            f"'{one_line(min(hidden))}' of the {kind} is no tensor of its state_dict"
        )
    unset = next((name for name, value in state.items() if is_lazy(value)), None)
    raise_if(
        unset is not None,
        ArchitectureError,
        f"'{one_line(unset)}' of the {kind} has no values yet",
        "run the module on an image first",
    )
    foreign = foreign_tensor(module)
    raise_if(
        foreign is not None,
        ArchitectureError,
        f"{one_line(foreign)} of the {kind} is no tensor of torch's own type",
        "give it as an ordinary tensor, which holds its entries",
    )
    tensors = {name: value.detach() for name, value in state.items()}
    require_weights(tensors, f"the {kind}")
    try:
        spec = build.spec_of(
            net,
            size=input_size or build.input_size_of(net),
            mean=statistics_per_channel(mean),
            std=statistics_per_channel(std),
        )
        spec = replace(spec, resized=resized)
        require_pixel_statistics(spec.size, spec.mean, spec.std)
    except (UsageError, Refused) as failure:
        raise UsageError(
            f"which images does the {kind} take? {one_line(failure)}",
            "load(module, mean=0.5, std=0.5, input_size=(1, 28, 28)); mean=0, std=1 if it takes pixels in [0, 1]",
        ) from failure
    arch = PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", kind)[:100]
    # so that the digest covers parts without tensors
    shown = {"structure": program_digest(net)[:16]}
    try:
        model = build.load(
            build.with_network(Checkpoint(tensors, Record(arch, shown, spec, 0)), net)
        )
        with torch.no_grad():
            weight = next(model.parameters(), torch.zeros(()))
            width = model(torch.zeros(1, *spec.size, dtype=weight.dtype)).shape[1]
    except ArchitectureError as failure:
        raise ArchitectureError(
            f"the {kind} is no classifier of images of size {spec.size}: {failure.message}",
            "it must map (b, c, h, w) to logits (b, k)",
        ) from failure
    _require_same_function(module, model)
    class_count = getattr(net, "num_classes", None)  # of any type, in a module of the user's
    is_number = isinstance(class_count, int)
    ends = (is_number and class_count == 0) or (
        features and not (is_number and class_count == width)
    )
    raise_if(
        width < 2 and not ends,
        ArchitectureError,
        f"the {kind} returns one logit an image",
        "a classifier has two logits or more",
    )
    opened = build.with_network(
        Checkpoint(tensors, Record(arch, shown, spec, 0 if ends else width)), net
    )
    (require_features if features else require_classifier)(opened, f"the {kind}")
    return opened


@torch.no_grad()
def _require_same_function(module: nn.Module, model: PixelModel) -> None:
    """Raise ArchitectureError unless the network that was made of a module gives the module's logits.

    Copying a module, taking its weights out and putting them in again runs code of its classes,
    hooks and types of tensors. Two images of noise, each alone; a module that does not run on them,
    or that answers otherwise when it is asked twice, has no logits to compare.
    """
    numbers = [*module.parameters(), *module.buffers(), torch.zeros(())]
    weights = [value for value in numbers if value.is_floating_point()]
    weight = weights[0]
    build.keep_float32(weight.device)
    ours = next(model.parameters(), torch.zeros(())).dtype
    noise = torch.rand(2, *model.input_size, generator=torch.Generator().manual_seed(22))
    images = model.normalize(noise.to(ours))
    try:
        with _evaluated(module), torch.random.fork_rng(devices=[]):
            theirs, repeated = (
                torch.cat([module(image[None].to(weight.device, weight.dtype)) for image in images])
                for _ in range(2)
            )
        theirs = theirs.to("cpu", ours)
        if not torch.equal(theirs, repeated.to("cpu", ours)):
            return
    except Exception:  # code of the module raises errors of any type
        return
    logits = torch.cat([model.net(image[None]) for image in images])
    dtypes = {value.dtype for value in weights[:-1]} or {ours}
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    is_run_alike = dtypes == {ours} and weight.device.type == "cpu"
    scale = logits.amax(0) - logits.amin(0) if is_run_alike else logits.abs().amax()
    allowed = rounding * scale + 8 * torch.finfo(ours).eps * logits.abs()
    raise_if(
        theirs.shape != logits.shape or not bool(((theirs - logits).abs() <= allowed).all()),
        ArchitectureError,
        f"the network that is made of the {type(module).__name__} and its weights gives other logits than the module",
        "its copy, state_dict, hooks of loading or types of tensors change it: give it as plain modules and tensors",
    )


@contextmanager
def _evaluated(module: nn.Module) -> Iterator[None]:
    """Put all parts of a module into eval mode for the body, without calling its own `eval`."""
    training = {part: part.training for part in module.modules()}
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part, was_training in training.items():
            part.training = was_training


def _is_pixel_model(module: nn.Module) -> TypeGuard[PixelModel]:
    """Whether a module is just normalisation and network: no own forward or hook."""
    if type(module) is not PixelModel:
        return False
    normalize = module.normalize
    parts: list[nn.Module] = [module, normalize]
    if type(normalize) is ResizedPixels:
        parts += [normalize.resize, normalize.normalize]
        if not _is_resize(normalize.resize):
            return False
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    replaced = any("forward" in vars(part) for part in parts)
    return type(parts[-1]) is PixelNormalize and not hooked and not replaced


def _is_resize(resize: nn.Module) -> bool:
    """Tell whether this is the resize of its sides, with its own matrices."""
    if type(resize) is not PixelResize:
        return False
    standard = PixelResize(*zip(resize.rows.shape[::-1], resize.columns.shape[::-1], strict=True))
    return all(
        torch.equal(getattr(resize, name).cpu().double(), getattr(standard, name))
        for name in ("rows", "columns")
    )


def _are(values: Statistics | None, statistics: Tensor) -> bool:
    """Tell whether these are the module's own statistics (c,); None says nothing else."""
    numbers = statistics_per_channel(values)
    expected = statistics.new_tensor(statistics.tolist() if numbers is None else numbers)
    return len(expected) in (1, len(statistics)) and bool((expected == statistics).all())


def statistics_per_channel(values: Statistics | None) -> tuple[float, ...] | None:
    """Return a mean or a standard deviation, of one number or one a channel, as a tuple."""
    if values is None:
        return None
    return (
        (float(values),)
        if isinstance(values, (int, float))
        else tuple(float(value) for value in values)
    )


def mean_of(
    arch: str, members: Sequence[build.OpenCheckpoint], mirror: bool
) -> build.OpenCheckpoint:
    """Return the mean of these networks' logits, with `mirror` at the mirror image too; its lineage
    tells all their steps.

    Raises:
        UsageError: one is of another architecture, or takes or gives something else than the first.
        ArchitectureError: the architecture has no mean.
    """
    raise_if(
        not isinstance(mirror, bool) or len(members) > MOST_MEMBERS,
        UsageError,
        "a mean cannot be built of these",
        f"mirror=true or false, and at most {MOST_MEMBERS} members",
    )
    first = members[0].record
    same = ("input", "classes", "class_names")
    for number, member in enumerate(members, 1):
        member_record = member.record
        raise_if(
            member_record.arch != arch,
            UsageError,
            f"member {number} is of {one_line(member_record.arch)}, not {arch}",
        )
        differs = [name for name in same if getattr(member_record, name) != getattr(first, name)]
        if differs:
            raise UsageError(
                f"member {number} has another {differs[0].replace('_', ' ')} than the first"
            )
        raise_if(
            member_record.surgery or not isinstance(getattr(member.net, "head", None), FlatHead),
            ArchitectureError,
            f"member {number}: certvit does not average such networks",
            "certvit_lip_*, sort or mix",
        )
    arguments: dict[str, Any] = {"members": len(members), "mirror": mirror}
    for key in sorted({key for member in members for key in member.record.arch_args}):
        values = [member.record.arch_args.get(key) for member in members]
        if all(value == values[0] for value in values):
            arguments[key] = values[0]
        else:  # an absent one keeps the architecture's default: timm drops None
            arguments |= {
                f"{key}_{i}": value for i, value in enumerate(values, 1) if value is not None
            }
    steps = tuple(step for member in members for step in member.record.lineage)
    dataset = (
        first.dataset if all(member.record.dataset == first.dataset for member in members) else None
    )
    record = replace(first, arch_args=arguments, dataset=dataset, lineage=steps, evidence=())
    tensors = mean_tensors([member.tensors for member in members], mirror)
    digests = {"members": [member.digest for member in members], "mirror": mirror}
    last = Checkpoint(members[-1].tensors, replace(record, arch_args=members[-1].record.arch_args))
    joined = last.derive(tensors, MEAN, digests, arch_args=arguments)
    return build.with_network(joined, build.build(joined.record, like=tensors))
