"""The door of Python: arguments are read by their names, and errors speak of keyword arguments."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from certcli.api.arguments import READERS, in_python, read_choice, require_option_names
from certcli.system.ambient import as_stated
from certcli.system.errors import CertvitError, UsageError
from certcli.system.options import choices
from certcli.system.reading import require_unchanged

P = ParamSpec("P")
R = TypeVar("R")
RENAMED = {
    **dict.fromkeys(("data", "pixels"), "images"),
    **dict.fromkeys(("eps", "radius", "sizes", "at"), "radii"),
    "network": "source",
}
"""Names of version 0.1 and those that replace them; 0.3 drops this table."""


class Signature:
    """A function's parameters, with those of its `**options: Unpack[TypedDict]`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.hints = get_type_hints(function)
        self.parameters = inspect.signature(function).parameters
        self.options: set[str] = set()
        for one in self.parameters.values():
            if one.kind is one.VAR_KEYWORD:
                self.options = set(get_type_hints(*get_args(self.hints[one.name])))
        self.names = [
            one.name for one in self.parameters.values() if one.kind is not one.VAR_KEYWORD
        ]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments as the function takes them.

        Raises:
            UsageError: a name is unknown or lacking, or a value is not what its name stands for.
        """
        allowed = {*self.names, *self.options}
        for old in kwargs.keys() - allowed:
            new = RENAMED.get(old)
            if new in allowed and new not in kwargs:
                warnings.warn(
                    f"{self.name}({old}=...) is now {self.name}({new}=...)",
                    DeprecationWarning,
                    stacklevel=3,
                )
                kwargs = {new if name == old else name: value for name, value in kwargs.items()}
        require_option_names(kwargs, allowed, self.name)
        try:
            bound = inspect.Signature(self.parameters.values()).bind(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError as failure:
            raise UsageError(
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
            with as_stated():
                result = function(**values)  # type: ignore[call-arg]
            require_unchanged()
            return result
        except CertvitError as failure:
            failure.message = in_python(failure.message)
            failure.hint = in_python(failure.hint)
            failure.args = (failure.message,)
            if failure.hint and failure.hint not in getattr(failure, "__notes__", ()):
                failure.add_note(failure.hint)
            raise

    return call
