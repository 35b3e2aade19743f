"""The door of Python: arguments are read by their names, and errors speak of keyword arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from certcli.api.arguments import READERS
from certcli.api.errors import in_python
from certcli.system.ambient import as_stated
from certcli.system.errors import CertvitError
from certcli.system.watched import require_unchanged

P = ParamSpec("P")
R = TypeVar("R")


def speaks_python(function: Callable[P, R]) -> Callable[P, R]:
    """Read the arguments of a function, reword its errors, and add the hint to what a traceback
    shows; torch's settings are those that are stated. A mapped checkpoint that another program
    wrote to meanwhile is an error.
    """
    signature = inspect.signature(function)
    variable = {name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        try:
            for name, value in bound.arguments.items():
                default = signature.parameters[name].default
                if name not in variable and (value is not None or default is not None):
                    bound.arguments[name] = READERS[name](name, value)
            with as_stated():
                result = function(*bound.args, **bound.kwargs)
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
