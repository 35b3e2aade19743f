"""Options that mean the same everywhere. No torch: `certvit COMMAND --help` must be instant.

A command takes a few frozen dataclasses; `@command` spells them out as the flat options that
Typer reads.

    @group("Images")
    class Evaluation:
        dataset: str | None = option(None, "Images by name, or a folder of them.")

    @command("certvit certify m.safetensors -e 0.5", page="results.md")
    def certify(where: Evaluation = Evaluation(limit=100), talk: Talk = Talk()) -> None: ...

A field made by `option`, or whose type holds an `Option`, is an option of the panel's name; its
default is the field's, or that of the instance which the command gives as its own default. A field
may be a group again. Two groups of one command may not share a field. A dataclass of another room
with such fields and the attribute `panel`, as `certify.options.Local`, is a group, too.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer.models import ArgumentInfo, OptionInfo

from certcli.cli.shared import inputs
from certcli.evaluation.threat import parse_number
from certcli.system import errors, reading
from certcli.system.options import NOTE, Option, choices, require_choices

MOST_IMAGES = 2**24  # at a time: more than any memory holds


@dataclass(frozen=True)
class Reads:
    """A mark of options that name an input: a file, a checkpoint, or (folder) images."""

    folder: bool = False


@dataclass(frozen=True)
class Writes:
    """A mark of options that name an output: new, or --force, never an input.

    Args:
        resumable: --resume continues a file that exists.
        figure: the ending names the format.
    """

    resumable: bool = False
    figure: bool = False


def typed_share(text: str) -> float:
    """Return a share of the images, in [0, 1], which a gate demands."""
    value = parse_number(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is no share of the images: 0.9 demands 90 %")
    return value


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A .safetensors file, a folder with model.safetensors, certvit/digits, a timm name, or hf-hub:OWNER/NAME.",
    ),
    Reads(),
]
Force = Annotated[bool, Option("Replace an existing output file.")]
Seed = Annotated[int, Option("Seed of every random choice.", min=0, max=2**63 - 1)]
Plot = Annotated[
    Path | None,
    Option(
        "Draw the result: FILE.png, FILE.svg or FILE.pdf.",
        metavar="FILE",
        panel="Output",
        mark=Writes(figure=True),
    ),
]
Html = Annotated[
    Path | None,
    Option("Write the result as an HTML page.", metavar="FILE.html", panel="Output", mark=Writes()),
]
Records = Annotated[
    Path | None,
    Option(
        "Write one JSON line for each image, during the run.",
        metavar="FILE.jsonl",
        panel="Output",
        mark=Writes(resumable=True),
    ),
]
Resume = Annotated[
    bool, Option("Continue an interrupted --records file of the same run.", panel="Output")
]


Mark = TypeVar("Mark")
PANEL = "panel"
EVERYTHING = "certvit.help_all"
"""Key in the context of a help that hides no option."""
SHARED_OFTEN = (
    *("help", "help_all", "dataset", "data_dir", "limit", "output", "force", "as_json", "quiet"),
)
"""Fields that everybody needs in the first week."""
SHARED = ("Images", "Checkpoints of others", "Machine", "Output")
"""Panels that many commands have: after a command's own, in this order everywhere."""
WORDS = {bool: "", int: "N", float: "NUMBER", Path: "PATH", str: "NAME"}
"""What stands for a value of a type where the option names nothing better; a flag takes no
value."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def group(panel: str | None = None) -> Callable[[type], Any]:
    """Class decorator: a frozen dataclass of options, shown in `--help` under `panel`."""

    def decorate(kind: type) -> Any:
        dataclass_of: Any = dataclass(frozen=True, kw_only=True)(kind)
        setattr(dataclass_of, PANEL, panel)
        return dataclass_of

    return decorate


def command(
    *examples: str,
    page: str,
    run: str = "",
    often: tuple[str, ...] = (),
    panels: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn the groups among a function's parameters into options.

    Args:
        examples: command lines at the end of `--help`.
        page: the docs page that `--help` names.
        run: "package.module:function" that does the work, imported at the call, so that `--help`
            imports no torch; it takes the parameters of the decorated function. Empty: that one.
        often: fields that `--help` shows, beside those of SHARED_OFTEN; `--help-all` then shows the
            others too. Empty: `--help` shows all.
        panels: a word among the typed ones, such as a method, and the panel that `--help` then
            shows whole.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        flat: dict[str, inspect.Parameter] = {}
        groups: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            kind = hints[parameter.name]
            if is_dataclass(kind):
                groups[parameter.name] = kind
                options = _flat_options(kind, parameter.default)
            else:
                options = [parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY)]
            for option in options:
                if option.name in flat:
                    raise TypeError(f"{function.__name__} has two options {option.name}")
                flat[option.name] = option

        if often:
            flat["help_all"] = _HELP_ALL

        @wraps(function)
        def expanded(**values: Any) -> None:
            values.pop("help_all", None)
            for name, value in values.items():
                # float("nan") parses, and passes every gate
                if isinstance(value, float) and not math.isfinite(value):
                    option = spelling(name, info_of(flat[name].annotation))[-1]
                    raise errors.UsageError(
                        f"{option} {value} is not a finite number",
                        f"certvit {function.__name__} --help",
                    )
            inputs.require_early(values)
            built = {name: _build_group(kind, values) for name, kind in groups.items()}
            module, _, name = run.partition(":")
            work = getattr(import_module(module), name) if run else function
            work(**built, **values)

        wrapper: Any = expanded
        shown = sorted(flat.values(), key=_place_in_help)
        wrapper.__signature__ = inspect.Signature(shown, return_annotation=None)
        wrapper.__annotations__ = {option.name: option.annotation for option in shown} | {
            "return": None
        }
        wrapper.epilog = "\n\n".join(
            ["Examples:", *(f"  {example}" for example in examples), f"More: {_docs() / page}"]
        )
        wrapper.page = page
        wrapper.often = frozenset((*(often or flat), *SHARED_OFTEN))
        wrapper.panels = panels
        return expanded

    return decorate


def _docs() -> Path:
    """The folder of the documentation: in a wheel in the package, in a checkout beside it."""
    package = Path(__file__).parents[2]
    packed = package / "docs"
    return package.parent / "docs" if reading.is_absent(packed) else packed


def _show_all(context: typer.Context, asked: bool) -> None:
    if asked:
        context.meta[EVERYTHING] = True
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            metavar="",
            is_eager=True,
            callback=_show_all,
            help="Show every option and exit.",
        ),
    ],
)


def _place_in_help(option: inspect.Parameter) -> int:
    info = info_of(option.annotation)
    panel = getattr(info, "rich_help_panel", None)
    return (
        -1 if isinstance(info, ArgumentInfo) else SHARED.index(panel) + 1 if panel in SHARED else 0
    )


def _flat_options(kind: Any, defaults: Any) -> list[inspect.Parameter]:
    """A group's fields as keyword parameters; `defaults`: an instance with the command's own."""
    hints = hints_of(kind)
    options = []
    for field in fields(kind):
        if field.name not in hints:
            continue
        default = (
            _field_default(field)
            if defaults is inspect.Parameter.empty
            else getattr(defaults, field.name)
        )
        if is_dataclass(hints[field.name]):
            options += _flat_options(hints[field.name], default)
        else:
            options.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=hints[field.name],
                )
            )
    return options


def _build_group(kind: Any, values: dict[str, Any]) -> Any:
    hints = hints_of(kind)
    group = kind(
        **{
            name: _build_group(hint, values) if is_dataclass(hint) else values.pop(name)
            for name, hint in hints.items()
        }
    )
    require_choices(group)
    return group


def hints_of(kind: Any) -> dict[str, Any]:
    """Return the type of each option of a group, with Typer's note, and of each group within it."""
    hints = get_type_hints(kind, include_extras=True)
    bases = get_type_hints(kind)
    types = {}
    for item in fields(kind):
        hint = hints[item.name]
        notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        note = item.metadata.get(NOTE) or next((n for n in notes if isinstance(n, Option)), None)
        if note is not None:
            types[item.name] = _typer_hint(item.name, bases[item.name], note, getattr(kind, PANEL))
        elif notes or is_dataclass(hint):
            types[item.name] = hint
    return types


def _typer_hint(name: str, base: Any, note: Option, panel: str | None) -> Any:
    def parse(text: Any) -> Any:
        try:
            return note.read(str(text)) if note.read is not None else text
        except ValueError as failure:
            raise typer.BadParameter(str(failure)) from failure

    flag = [f"--{name.replace('_', '-')}"] if base is bool else []
    typer_option = typer.Option(
        *(note.names or flag),
        help=note.help,
        metavar=note.metavar or WORDS.get(_type_of_value(base), "VALUE"),
        parser=None if note.read is None else parse,
        rich_help_panel=note.panel or panel,
        min=note.min,
        max=note.max,
        callback=note.callback,
        is_eager=note.is_eager,
    )
    marks = [note.mark] if note.mark is not None else [Reads()] * (Path in get_args(base))
    # Typer reads no union, and offers a Literal by its own rules
    if get_origin(base) is not list and (note.read is not None or choices(base)):
        base = str | None if type(None) in get_args(base) else str
    return Annotated[(base, typer_option, *marks)]


def _field_default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


def info_of(hint: Any) -> OptionInfo | ArgumentInfo | None:
    """Typer's note in an Annotated type."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((note for note in notes if isinstance(note, (OptionInfo, ArgumentInfo))), None)


def spelling(name: str, info: Any) -> list[str]:
    """How an option is written, shortest first; an argument by its metavar."""
    if isinstance(info, ArgumentInfo):
        return [info.metavar or name.upper()]
    # inside Annotated, Typer keeps the first declaration where the default used to be
    declared = [
        item
        for item in (getattr(info, "default", None),)
        if isinstance(item, str) and item.startswith("-")
    ]
    declared += list(getattr(info, "param_decls", None) or [])
    return sorted(declared, key=len) or [f"--{name.replace('_', '-')}"]


def marked(groups: Iterable[object], kind: type[Mark]) -> Iterator[tuple[str, Mark, Any]]:
    """(option, mark, value) for every option with a mark of this kind and a value."""
    for part in groups:
        for name, hint in hints_of(type(part)).items():
            value = getattr(part, name)
            for note in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
                if isinstance(note, kind) and value is not None:
                    yield spelling(name, info_of(hint))[-1], note, value


def _type_of_value(base: Any) -> Any:
    if get_origin(base) is None:
        return base
    return next((_type_of_value(part) for part in get_args(base) if part is not type(None)), None)
