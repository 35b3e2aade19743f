"""The rule table: which module types, functions and tensor methods have a theorem, and under which options.

A module rule applies to a module that runs exactly the known forward: its type is the registered one (or a subclass that
changes nothing but its construction), nothing was patched onto the instance, and the options it has are those of the
theorem. Everything else is traced through to functions and methods, and what has no rule there makes the bound infinite
and names itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

Rule = Callable[..., Any]

_FAMILIES = (
    "linear",
    "pointwise",
    "norms",
    "pooling",
    "attention",
    "l2",
    "lipschitz_attentions",
    "token_convolution",
    "products",
    "shapes",
    "joining",
    "residual",
    "special",
    "mixing",
)
_HARMLESS = frozenset(
    ("__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__annotate__", "__constants__",
     "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__", "extra_repr", "__repr__",
     "reset_parameters", "_init_weights", "__annotations_cache__", "__annotate_func__")
)  # fmt: skip
"""What a subclass may define and still run its parent's forward on its parent's parts."""


class NoRule(Exception):
    """Why no bound can be proven here, in one line."""


@dataclass(frozen=True)
class ModuleRule:
    kind: type[nn.Module]
    apply: Rule
    when: Callable[[Any], bool]


MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}
FUNCTION_RULES: dict[Any, Rule] = {}
METHOD_RULES: dict[str, Rule] = {}


def module_rule(*kinds: type[nn.Module], when: Callable[[Any], bool] = lambda module: True) -> Callable[[Rule], Rule]:
    """Register a rule for modules of these types for which `when` holds; others are traced through."""

    def register(rule: Rule) -> Rule:
        for kind in kinds:
            MODULE_RULES[kind] = ModuleRule(kind, rule, when)
        return rule

    return register


def function_rule(*functions: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for function in functions:
            FUNCTION_RULES[function] = rule
        return rule

    return register


def method_rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            METHOD_RULES[name] = rule
        return rule

    return register


def runs_known_code(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `module` is a `kind` whose methods are all `kind`'s own: no override in a subclass, no patch on it."""
    for cls in type(module).__mro__:
        if cls is kind:
            return not any(callable(getattr(type(module), name, None)) for name in vars(module))
        if any(name not in _HARMLESS for name in vars(cls)):
            return False
    return False


def find_module_rule(module: nn.Module) -> ModuleRule | None:
    """The rule of the class whose forward this module runs, or None."""
    load_rules()
    for kind in type(module).__mro__:
        if kind in MODULE_RULES:
            rule = MODULE_RULES[kind]
            return rule if runs_known_code(module, kind) and rule.when(module) else None
    return None


@cache
def load_rules() -> None:
    """Import every family once; each registers its rules."""
    for family in _FAMILIES:
        import_module(f"certcli.lipschitz.rules.{family}")


def ruled_kinds() -> Iterator[type[nn.Module]]:
    load_rules()
    yield from MODULE_RULES
