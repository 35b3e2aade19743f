"""The door of Python: arguments are read by their names, and errors speak of keyword arguments."""

import functools
import inspect
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from certcli.api.arguments import (
    READERS,
    in_python,
    plain_value,
    read_choice,
    require_option_names,
)
from certcli.system import errors, reading, torch_modes
from certcli.system.options import choices

P = ParamSpec("P")
R = TypeVar("R")


class Signature:
    """A function's parameters, with those of its `**options: Unpack[TypedDict]`, or `Annotated[Any, command]`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.hints = get_type_hints(function, include_extras=True)
        self.parameters = inspect.signature(function).parameters
        taken = [one for one in self.parameters.values() if one.kind is one.VAR_KEYWORD]
        self.names = [name for name in self.parameters if name not in [one.name for one in taken]]
        self.kinds = [get_args(self.hints[one.name])[-1] for one in taken]

    @cached_property
    def options(self) -> set[str]:
        """Names of the options: keys of TypedDicts, and what the commands named take."""
        offers = (
            options_of_command(kind) if isinstance(kind, str) else get_type_hints(kind)
            for kind in self.kinds
        )
        return {name for offered in offers for name in offered} - {*self.names}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments as the function takes them.

        Raises:
            UsageError: a name is unknown or lacking, or a value is not what its name stands for.
        """
        allowed = {*self.names, *self.options}
        require_option_names(kwargs, allowed, self.name)
        try:
            bound = inspect.Signature(self.parameters.values()).bind(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError as failure:
            raise errors.UsageError(
                f"{self.name}: {failure}", f"{self.name}({', '.join(self.names)})"
            ) from failure
        return {
            **kwargs,
            **{n: self._value(n, v) for n, v in bound.arguments.items() if n in self.names},
        }

    def _value(self, name: str, value: Any) -> Any:
        if value is None and self.parameters[name].default is None:
            return None
        if names := choices(self.hints[name]):
            return read_choice(name, value, names)
        return READERS[name](name, value) if name in READERS else value


_OF_FILES = frozenset(("output", "force", "quiet", "json", "help_all"))


def options_of_command(name: str) -> list[str]:
    """Return the keyword arguments of a command: its long options, but those of files and talk."""
    from certcli.cli.main import COMMANDS
    from certcli.cli.shared.command import info_of, spelling

    parameters = inspect.signature(COMMANDS[name]).parameters.values()
    longest = [spelling(one.name, info_of(one.annotation))[-1] for one in parameters]
    names = [option[2:].replace("-", "_") for option in longest if option.startswith("--")]
    return [name for name in names if name not in _OF_FILES]


def run_command(name: str, source: str, path: Path, force: bool, options: dict[str, Any]) -> None:
    """Run a command from file to file, without a word: options are read as they are typed.

    Raises:
        UsageError: the command refuses a value.
    """
    from certcli.cli.main import program
    from certcli.cli.shared.output import Invocation, Sink

    words = [name, "--output", str(path), *["--force"] * force]
    for option, value in options.items():
        plain = plain_value(value)
        several = plain if isinstance(plain, (list, tuple)) else [plain]
        for one in several:
            if one is not None and one is not False:
                words.append(f"--{option.replace('_', '-')}")
                words += [] if one is True else [str(one)]
    before = Sink.invocation
    Sink.invocation = Invocation(silent=True)
    try:
        program(words)([*words, "--", source], prog_name="certvit", standalone_mode=False)
    except Exception as failure:  # Typer's own: a value that an option does not take
        if not hasattr(failure, "format_message"):
            raise
        raise errors.UsageError(
            errors.one_line(failure.format_message()), f"certvit {name} --help lists its options"
        ) from failure
    finally:
        Sink.invocation = before


def speaks_python(function: Callable[P, R]) -> Callable[P, R]:
    """Read the arguments of a function, reword its errors, and add the hint to what a traceback
    shows; torch's settings are those that are stated. A mapped checkpoint that another program
    wrote to meanwhile is an error.
    """
    signature = Signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            values = signature.read(args, kwargs)
            with torch_modes.as_stated():
                result = function(**values)  # type: ignore[call-arg]
            reading.require_unchanged()
            return result
        except errors.CertvitError as failure:
            failure.message = in_python(failure.message)
            failure.hint = in_python(failure.hint)
            failure.args = (failure.message,)
            if failure.hint and failure.hint not in getattr(failure, "__notes__", ()):
                failure.add_note(failure.hint)
            raise

    return call
