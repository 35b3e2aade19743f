"""The base of a method's options: a frozen dataclass, from which `certify` makes a panel."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class CertifierOptions:
    """The options of a method that has none; others inherit, and annotate with `Option`."""

    panel: ClassVar[str] = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the options among plain values; other names and None are left out.

        Raises:
            UsageError: a value has another type, or no meaning.
        """
        names = {item.name for item in fields(cls)}
        return cls(
            **{name: value for name, value in values.items() if name in names and value is not None}
        )
