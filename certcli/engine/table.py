"""The rule table of a domain: the module types, functions and tensor methods that have a
theorem. Theorems hold for library code as it was imported, and for none that was patched since.

A class is pinned when it gets a rule: its methods, the functions of the module that defines it, and
their code, which can be exchanged as well. torch's functions, the methods of tensors and those of
`nn.Module` are pinned here. A patch from before certvit was imported shows in the module that its
code comes from.

A module rule applies to a module that runs exactly the known forward: its type is the registered
one (or a subclass that changes nothing but its construction), nothing was patched onto the
instance, and the options it has are those of the theorem. Every other module is traced through to
functions and methods. One of these without a rule makes the bound infinite, and the reason names
it.
"""

import functools
import operator
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Names = dict[str, tuple[Any, CodeType | None]]
_TORCH = {*dir(torch._C._VariableFunctions), *torch.functional.__all__}
_BEFORE_FORWARD = ("__init__", "__setstate__")
"""What makes or copies a module, and no forward: torch replaces both itself when something is
compiled."""


def _is_of(function: Any, libraries: Collection[str]) -> bool:
    """Tell whether a function is one of these libraries', or C's: it was not replaced before."""
    return type(function) is not FunctionType or function.__module__.split(".")[0] in libraries


_SEEN: dict[Any, tuple[list[Any], list[tuple[Any, CodeType]], Names]] = {}
_CLASSES: dict[type, list[Names]] = {}
_PYTHON = sys.stdlib_module_names | {"typing_extensions", "torch"}


def _functions_of(owner: Any) -> Names:
    """Return the functions of a class or module by name, with their code: None for C functions.

    The same dictionary as last time, where every name, value and code is the same object: each trace
    asks for thousands.
    """
    content = [*vars(owner), *vars(owner).values()]
    before, coded, names = _SEEN.get(owner, ([], [], {}))
    same = len(before) == len(content) and all(map(operator.is_, before, content))
    if same and all(function.__code__ is code for function, code in coded):
        return names
    coded = []
    names = {}
    for name, value in vars(owner).items():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if callable(inner):
            names[name] = value, getattr(inner, "__code__", None)
            coded += [(inner, code) for code in names[name][1:] if code is not None]
    _SEEN[owner] = content, coded, names
    return names


_LIBRARY = (torch, functional, nn.Module, *reversed(Tensor.__mro__))


def _library_functions() -> dict[str, Names]:
    """Return torch's functions and methods, unbound, by the name of their owner; of each name the
    last."""
    of_torch, functions, of_modules, *of_tensors = map(_functions_of, _LIBRARY)
    return {
        "torch": {name: pin for name, pin in of_torch.items() if name in _TORCH},
        "torch.nn.functional": functions,
        "torch.Tensor": functools.reduce(operator.or_, of_tensors),
        "torch.nn.Module": {n: pin for n, pin in of_modules.items() if n not in _BEFORE_FORWARD},
    }


_PINNED = _library_functions()
_QUIET: list[Names] = []
"""What was read when nothing was last seen to be replaced."""


def patched_function() -> str | None:
    """Return the name of the first function of torch that was replaced, or None."""
    read = list(map(_functions_of, _LIBRARY))
    if _QUIET and all(map(operator.is_, read, _QUIET)):
        return None
    now = _library_functions()
    for owner, names in _PINNED.items():
        for name, pinned in names.items():
            if now[owner].get(name) != pinned or not _is_of(pinned[0], _PYTHON):
                return f"{owner}.{name}"
    _QUIET[:] = read
    return None


def unchanged(kind: type[nn.Module]) -> bool:
    """Tell whether the class, its bases and the functions of the modules they stand in are as they
    were at the first call, and its forward its library's own."""
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    modules = dict.fromkeys(base.__module__ for base in bases)
    owners = [*bases, *(sys.modules[name] for name in modules if name in sys.modules)]
    now = [_functions_of(owner) for owner in owners]
    libraries = kind.__module__.split(".")[0], "torch"
    return _CLASSES.setdefault(kind, now) == now and _is_of(kind.forward, libraries)


Rule = Callable[..., Any]
Register = Callable[[Rule], Rule]

_HARMLESS = frozenset(
    ("__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__", "__constants__",
     "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__", "extra_repr", "__repr__",
     "reset_parameters", "_init_weights", "__annotations_cache__", "__annotate_func__")
)  # fmt: skip
"""Names that a subclass may define while it still runs its parent's forward on its parent's
parts."""


class NoRule(Exception):
    """The reason, in one line, for which nothing can be proven here."""

    hint = "--method smoothing takes any network"


@dataclass(frozen=True)
class ModuleRule:
    kind: type[nn.Module]
    apply: Rule
    when: Callable[[Any], bool]


class RuleTable:
    """The theorems of one domain, registered by decorators when the rule files are imported.

    A rule gets the domain's context, the module (a module's rule), and the arguments of the traced
    call, where tensors that depend on the image are the domain's values and all others
    `walk.Constant`. It returns the result's value, or raises NoRule. A rule of `settles` gets the
    context, the value, and the operation that waits in it.
    """

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self.modules: dict[type[nn.Module], ModuleRule] = {}
        self.functions: dict[Any, Rule] = {}
        self.methods: dict[str, Rule] = {}
        self.settlers: dict[type, Rule] = {}

    def module(
        self,
        *kinds: type[nn.Module],
        when: Callable[[Any], bool] = lambda module: True,
        attributes: tuple[str, ...] = (),
    ) -> Register:
        """Register a rule for modules of these types where `when` holds; trace others.

        Args:
            attributes: The rule is a function's, and is called with these of the module.
        """

        def register(rule: Rule) -> Rule:
            of_module = with_attributes(rule, *attributes) if attributes else rule
            for kind in kinds:
                unchanged(kind)  # from here on
                self.modules[kind] = ModuleRule(kind, of_module, when)
            return rule

        return register

    def function(self, *functions: Any) -> Register:
        return _into(self.functions, functions)

    def method(self, *names: str) -> Register:
        return _into(self.methods, names)

    def settles(self, *kinds: type) -> Register:
        """Register a rule that charges waiting operations whose partner does not follow."""
        return _into(self.settlers, kinds)

    def find(self, module: nn.Module) -> ModuleRule | None:
        """Return the rule of the class whose forward this module runs, or None."""
        for kind in type(module).__mro__:
            if kind in self.modules:
                rule = self.modules[kind]
                return rule if runs_known_code(module, kind) and rule.when(module) else None
        return None


def _into(rules: dict[Any, Rule], names: tuple[Any, ...]) -> Register:
    """Return a decorator that enters a rule under these names."""

    def register(rule: Rule) -> Rule:
        rules.update(dict.fromkeys(names, rule))
        return rule

    return register


def with_attributes(rule: Rule, *names: str) -> Rule:
    """Return a module's rule: a function's rule, called with these attributes of the module."""

    @functools.wraps(rule)
    def of_module(ctx: Any, module: Any, x: Any) -> Any:
        return rule(ctx, x, **{name: getattr(module, name) for name in names})

    return of_module


def runs_known_code(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Tell whether all methods of `module` are `kind`'s: no override, no patch on either."""
    for cls in type(module).__mro__:
        if cls is kind:
            patched = any(callable(getattr(type(module), name, None)) for name in vars(module))
            return unchanged(kind) and not patched
        if any(name not in _HARMLESS for name in vars(cls)):
            return False
    return False
