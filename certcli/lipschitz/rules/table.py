"""The rule table: which module types, functions and tensor methods have a theorem, and under which options.

A module rule applies to a module that runs exactly the known forward: its type is the registered one (a subclass with the
inherited forward counts, one with its own does not), and nothing was patched onto the instance. Everything else is traced
through to functions and methods, and what has no rule there makes the bound infinite and names itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from certcli.lipschitz.value import Value

Rule = Callable[..., Value | list[Value]]

_FAMILIES = ("linear", "pointwise", "norms", "attention", "shapes", "residual")


class NoRule(Exception):
    """Why no bound can be proven here, in one line."""


@dataclass(frozen=True)
class ModuleRule:
    kind: type[nn.Module]
    apply: Rule


MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}
FUNCTION_RULES: dict[Any, Rule] = {}
METHOD_RULES: dict[str, Rule] = {}


def module_rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for kind in kinds:
            MODULE_RULES[kind] = ModuleRule(kind, rule)
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


def find_module_rule(module: nn.Module) -> ModuleRule | None:
    """The rule of the class whose forward this module runs, or None."""
    load_rules()
    if "forward" in vars(module):
        return None
    for kind in type(module).__mro__:
        if kind in MODULE_RULES:
            return MODULE_RULES[kind] if type(module).forward is kind.forward else None
        if "forward" in vars(kind):
            return None
    return None


def load_rules() -> None:
    """Import every family once; each registers its rules."""
    for family in _FAMILIES:
        import_module(f"certcli.lipschitz.rules.{family}")


def ruled_kinds() -> Iterator[type[nn.Module]]:
    load_rules()
    yield from MODULE_RULES
