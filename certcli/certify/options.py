"""The base of a method's options: a frozen dataclass, from which `certify` makes a panel."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from certcli.system.options import require_choices


@dataclass(frozen=True)
class CertifierOptions:
    """The options of a method that has none; others inherit, and annotate with `Option`.

    Raises:
        UsageError: a field has none of the values that its type names.
    """

    panel: ClassVar[str] = ""

    def __post_init__(self) -> None:
        require_choices(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the options among plain values of their types, as `evidence_schema.OPTIONS` lets
        them in; other names and None are left out.

        Raises:
            UsageError: a value has no meaning.
        """
        names = {item.name for item in fields(cls)}
        return cls(
            **{name: value for name, value in values.items() if name in names and value is not None}
        )
