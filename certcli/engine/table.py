"""The rule table of a domain: the module types, functions and tensor methods that have a theorem.

A module rule applies to a module that runs exactly the known forward: its type is the registered
one (or a subclass that changes nothing but its construction), nothing was patched onto the
instance, and the options it has are those of the theorem. Every other module is traced through to
functions and methods. One of these without a rule makes the bound infinite, and the reason names
it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from certcli.engine import pinned

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
        self, *kinds: type[nn.Module], when: Callable[[Any], bool] = lambda module: True
    ) -> Register:
        """Register a rule for modules of these types where `when` holds; trace others."""

        def register(rule: Rule) -> Rule:
            for kind in kinds:
                pinned.pin(kind)
                self.modules[kind] = ModuleRule(kind, rule, when)
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

    def settler(self, waiting: object) -> Rule:
        """Return the rule that settles a waiting operation; every type that waits has one."""
        return self.settlers[type(waiting)]


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
            return pinned.unchanged(kind) and not patched
        if any(name not in _HARMLESS for name in vars(cls)):
            return False
    return False
