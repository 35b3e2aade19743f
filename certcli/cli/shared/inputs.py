"""Arguments and paths from a command line's words, defaults from files, doubts about images. Imports are
in functions.

Defaults are those of the current folder's `certvit.toml`, or `[tool.certvit]` of `pyproject.toml`:

    [audit]                                     [tool.certvit.audit]
    time-budget = "90s"                         fail-on = ["certified@0.25<0.4"]

An option on the command line comes before `certvit.toml`, which comes before `pyproject.toml`, key
by key. A key is a long option without its dashes; options of written files and of talk belong to
the command line alone."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.checkpoint.shipped import shipped_names, shipped_path
from certcli.images.names import require_named
from certcli.system import errors, reading, registry

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint
    from certcli.checkpoint.record import Record
    from certcli.cli.shared.output import Sink
    from certcli.images.labelled import Images
    from certcli.models.build import OpenCheckpoint

LONGEST_NAME = 255
"""Characters of a file's name; a longer one is refused with all paths."""
FILES = (".safetensors", ".onnx", ".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Endings of files, which no network's name has."""
ANSWERED_AT_ONCE = 4
"""Images without labels that are classified together."""


def return_large_blocks() -> None:
    """Make glibc return freed blocks of 4 MiB at once: auditing ViT-B peaks at 1.4 files, not 2."""
    import ctypes

    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(-3, 4 * 2**20)  # M_MMAP_THRESHOLD


def require_early(options: Mapping[str, Any]) -> None:
    """Refuse a mistyped file or dataset before torch is imported.

    Args:
        options: the options of a command, by field.
    """
    source = options.get("ckpt")
    dataset = options.get("dataset")
    if isinstance(source, str) and source != "-":
        _require_file(source)
    if isinstance(dataset, str) and len(dataset) <= LONGEST_NAME:
        require_named(dataset)


def _require_file(source: str) -> None:
    """Raise CheckpointError for a path that does not exist; names of networks are looked at later."""
    path = Path(source)
    looks = path.suffix in FILES or (
        os.sep in source and not source.startswith(("hf-hub:", "hf_hub:"))
    )
    if not looks or not reading.is_absent(path) or shipped_path(source):
        return
    raise missing_file(
        source,
        "give a .safetensors file, a folder with model.safetensors, a timm name, or hf-hub:OWNER/NAME",
    )


def missing_file(source: str, hint: str) -> errors.CheckpointError:
    """Return the error for a path that does not exist; it names a network that comes with certvit."""
    near = get_close_matches(source, shipped_names(), 1)
    meant = f"did you mean '{near[0]}'? " if near else ""
    return errors.CheckpointError(f"no file {source}", f"{meant}{hint}")


def parse_arguments(pairs: list[str]) -> dict[str, Any]:
    """Return KEY=VALUE texts as a dict; a value that is JSON is decoded."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise errors.UsageError(
                f"'{errors.one_line(pair)[:80]}' is not KEY=VALUE", "--arch-arg img_size=32"
            )
        try:
            arguments[key] = json.loads(text)
        except (ValueError, RecursionError):
            arguments[key] = text
    return arguments


def typed_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.replace(",", " ").split())
    except ValueError as failure:
        raise errors.UsageError(
            f"{option} '{text}' is not a list of numbers",
            f"{option} 0.5 or {option} 0.48,0.45,0.41",
        ) from failure


def default_output(source: str, command: str, shards: bool = False) -> Path:
    """Return <stem>.<command>.safetensors beside a file, in the current folder for a name.

    Args:
        shards: it is the index of several files.
    """
    from certcli.checkpoint.tensor_files import ENDING, stem_of_checkpoint

    path = Path(source)
    ending = ENDING if shards else ".safetensors"
    if path.is_dir():
        return path / f"model.{command}{ending}"
    parent = Path() if reading.is_absent(path) else path.parent
    return (
        parent / f"{stem_of_checkpoint(path).replace(':', '_').replace('/', '_')}.{command}{ending}"
    )


def path_beside(path: Path, word: str) -> Path:
    """Return <stem>.<word>.safetensors beside an output, an index (but for "state") if it is."""
    from certcli.checkpoint.tensor_files import ENDING, is_index, stem_of_checkpoint

    if not path.name:
        raise errors.UsageError(f"-o {path} names no file", "-o FILE.safetensors")
    return path.with_name(
        f"{stem_of_checkpoint(path)}.{word}{ENDING if is_index(path) and word != 'state' else '.safetensors'}"
    )


def require_nameable(source: str) -> None:
    """Raise UsageError for a network that no checkpoint can name: it would not be opened again."""
    if source.endswith(".onnx"):
        raise errors.UsageError(
            f"{source} is a program, and a checkpoint names an architecture: it cannot be written as one",
            "certvit certify, attack, audit or lipschitz of it, without -o; or the checkpoint that it was exported from",
        )


def size_in_bytes(option: str, text: str) -> int:
    """Return bytes: M and G are powers of 1024, MB and GB of 1000, as disks and the hub count."""
    number = text.upper().removesuffix("B")
    base = 1000 if text.upper().endswith("B") else 1024
    try:
        size = int(float(number.rstrip("KMG")) * base ** ("KMG".find(number[-1:]) + 1))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise errors.UsageError(
            f"{option} '{text}' is not a size", f"{option} 500M, or {option} 2G"
        )
    return size


def answered(
    checkpoint: Checkpoint,
    images: Images,
    device: Any,
    sink: Sink,
    enough: Callable[[], bool] = lambda: False,
) -> Images:
    """Return images, labelled by the network's own answers (and say so) where unlabelled; the first
    of them, once it is `enough`.
    """
    import torch

    from certcli.images.labelled import sent
    from certcli.models import build

    if not images.unlabelled:
        return images
    model = build.load(checkpoint, device)
    classes: list[int] = []
    with torch.inference_mode():
        for _, pixels, _ in images.batches(ANSWERED_AT_ONCE):
            classes += model(sent(pixels, device)).argmax(1).tolist()
            if enough():
                break
    images = images.select(range(len(classes)))
    sink.note(
        f"{images.name}: {len(images)} images without labels, so attacks and certificates are "
        "about the network's own predictions, and accuracy is not measured"
    )
    class_names = checkpoint.record.class_names or tuple(
        str(number) for number in range(checkpoint.record.classes)
    )
    return images.answered(classes, tuple(class_names))


def doubt_images(images: Images, record: Record, sink: Sink) -> None:
    """Print the reasons why these images may say little about this network."""
    from certcli.evaluation.image_doubts import image_doubts

    for doubt in image_doubts(images, record.input.size[0]):
        sink.doubt(doubt)


def say_seen(checkpoint: OpenCheckpoint, images: Images, sink: Sink) -> dict[str, Any]:
    """Print and return how many of these images the network was trained or calibrated on; print
    where the program that runs its file answers otherwise.
    """
    from certcli.evaluation.image_doubts import doubts

    shares_seen, lines = doubts(checkpoint.record, images)
    for doubt in [*lines, *differing_answers(checkpoint, images)]:
        sink.doubt(doubt, first=True)
    return shares_seen


def differing_answers(checkpoint: OpenCheckpoint, images: Images) -> list[str]:
    """Return where the program that runs a file answers otherwise than the network read from it."""
    return checkpoint.differences(pixels for _, pixels, _ in images.batches(ANSWERED_AT_ONCE))


def doubt_accuracy(
    share: float,
    images: Images,
    checkpoint: Checkpoint,
    sink: Sink,
    predictions: Sequence[int | None] = (),
) -> None:
    """Warn where the share of right answers is about chance, or far below that of the record.

    predictions: of the first images, where they are known: they may be a permutation of the labels.
    """
    from certcli.evaluation.image_doubts import accuracy_doubts, permutation_doubt

    classes = checkpoint.record.classes
    answers = [prediction for prediction in predictions if prediction is not None]
    permuted = None
    if answers and len(images.classes) == classes and len(answers) == len(predictions):
        permuted = permutation_doubt(images, answers, classes)
    usual = accuracy_doubts(round(share * len(images)), len(images), checkpoint)
    for doubt in usual if permuted is None else [permuted]:
        sink.warn(doubt)


def remember_dataset(record: Record, images: Images) -> Record:
    """Return the record with the dataset's name (no path), and its class names if they are.

    Ten synset folders beside 1,000 classes name ten of them, at other numbers.
    """
    named = len(images.classes) == record.classes and not images.classes[0].isdigit()
    return replace(record, dataset=images.name, class_names=images.classes if named else None)


SETTINGS_FILES = (("pyproject.toml", ("tool", "certvit")), ("certvit.toml", ()))
"""File -> the place of certvit's table in it, in ascending order of precedence."""
CONFIGURED = ("audit",)
NOT_FROM_FILES = frozenset(("output", "force", "report", "html", "json", "quiet", "help"))
LARGEST_SETTINGS = 2**20
"""Bytes of a settings file."""


def take_settings(context: Any) -> None:
    """Give the called command its defaults. context: of the group, before the command's."""
    name = context.invoked_subcommand
    if name in CONFIGURED:
        context.default_map = {
            name: defaults_in_files(name, context.command.commands[name].params, context)
        }


def defaults_in_files(command: str, parameters: list[Any], context: Any) -> dict[str, Any]:
    """Return the defaults in the files by the name of their parameter, as words of a command line.

    Raises:
        UsageError: a key is no option, or the option refuses the value.
    """
    options = {
        option.removeprefix("--"): parameter
        for parameter in parameters
        for option in parameter.opts
        if option[:2] == "--"
    }
    allowed = {name: parameter for name, parameter in options.items() if name not in NOT_FROM_FILES}
    chosen: dict[str, Any] = {}
    for file, place in SETTINGS_FILES:
        path = Path(file)
        table = _settings_table(path, place)
        for other in table:
            if other not in CONFIGURED:
                raise errors.UsageError(
                    f"{path}: certvit has no settings for '{errors.one_line(other)}'",
                    registry.one_of(other, CONFIGURED),
                )
        section = table.get(command, {})
        if not isinstance(section, dict):
            raise errors.UsageError(
                f"{path}: [{command}] is no table", f'[{command}]\ntime-budget = "2m"'
            )
        for key, value in section.items():
            if key not in allowed:
                raise errors.UsageError(
                    f"{path}: [{command}] has no setting '{errors.one_line(key)}'",
                    registry.one_of(key, allowed),
                )
            parameter = allowed[key]
            where = f"{path}: [{command}] {key}"
            words = _typed_words(value, parameter.multiple)
            try:
                parameter.process_value(context, words)
            except Exception as failure:  # Typer's, of whichever click it brings
                if not hasattr(failure, "format_message"):
                    raise
                raise errors.UsageError(
                    f"{where}: {errors.one_line(failure)}", f"certvit {command} --help"
                ) from failure
            chosen[parameter.name] = words
    return chosen


def _settings_table(path: Path, place: tuple[str, ...]) -> dict[str, Any]:
    try:
        if reading.is_absent(path):
            return {}
        table: Any = tomllib.loads(reading.read_bounded(path, LARGEST_SETTINGS).decode())
    except (OSError, ValueError, RecursionError) as failure:
        raise errors.UsageError(
            f"{path} cannot be read: {errors.one_line(failure)}", "it must be TOML, UTF-8"
        ) from failure
    for name in place:
        table = table.get(name, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise errors.UsageError(
            f"{path}: {'.'.join(place)} is no table", '[tool.certvit.audit]\ntime-budget = "2m"'
        )
    return table


def _typed_words(value: Any, several: bool) -> Any:
    """Return a value of TOML as it is typed; the option refuses what it does not take."""
    if several:
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return str(value)
