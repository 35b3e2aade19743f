"""Every number of a stranger's file has the range that the arithmetic behind it bears."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import certcli
from certcli.checkpoint.record import Record
from certcli.checkpoint.schema import MOST_DIGITS, Json, decode_json
from certcli.models.diffusion import Schedule
from certcli.nn.unet import UNetShape
from certcli.system.errors import Refused

OF_THE_PACKAGE = "certcli.report.shares"
"""Reads the package's own table."""
FREE = {
    "SmoothingOptions.seed": "below 2^64, which is beyond what the schema can say",
    "Record.arch_args": "arch_arguments",
    "ConfigFields.model_args": "arch_arguments",
    "Replacement.args": "surgery_arguments converts it",
    "CertifyResult.parameters": "converted to the method's options",
    "LineageStep.parameters": "shown; what is read of it is converted",
    "Evidence.parameters": "converted to the command's structure",
    "Evidence.result": "converted to the command's structure",
    "Run.parameters": "compared with the run's, converted to the method's options",
    "Run.network": "compared with the run's",
    "ReportFields.function": "compared with the network's",
    "Network.reading": "not read",
    "CertifiedShares.parameters": "converted to the method's options",
    "PatchShares.parameters": "converted to the method's options",
    "AttackShares.settings": "converted as evidence",
    "ConfigFields.num_features": "compared with the network's",
    "ConfigFields.global_pool": "compared with the network's",
    "Pixels.auto_map": "named",
    "IndexFields.metadata": "not read",
    "OptimiserFields.state": "a run's own numbers, under its digest",
    "OptimiserFields.param_groups": "a run's own numbers, under its digest",
    "AdaptFields.records": "a run's own numbers, under its digest",
}
"""Fields without a range, and what limits the numbers in them beyond their digits."""


def structures() -> Iterator[type]:
    for module in pkgutil.walk_packages(certcli.__path__, "certcli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    waiting = [msgspec.Struct]
    while waiting:
        derived = waiting.pop().__subclasses__()
        waiting += derived
        ours = (kind for kind in derived if kind.__module__.startswith("certcli"))
        yield from (kind for kind in ours if kind.__module__ != OF_THE_PACKAGE)
    yield from (Record, Schedule, UNetShape)


def numbers(kind: inspect.Type, place: str, visited: set[type]) -> Iterator[tuple[str, Any]]:
    """Yield each number and each free value below a type, once a structure."""
    if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
        if kind.cls not in visited:
            visited.add(kind.cls)
            for field in kind.fields:
                yield from numbers(field.type, f"{kind.cls.__name__}.{field.name}", visited)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from numbers(one, place, visited)
    elif isinstance(kind, inspect.TupleType):
        for one in kind.item_types:
            yield from numbers(one, place, visited)
    elif isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        yield from numbers(kind.item_type, place, visited)
    elif isinstance(kind, inspect.DictType):
        yield from numbers(kind.value_type, place, visited)
    else:
        texts = (inspect.StrType, inspect.BoolType, inspect.NoneType, inspect.LiteralType)
        if not isinstance(kind, texts):
            yield place, kind


def test_every_number_at_the_door_has_a_range() -> None:
    """An exponent of 10^7 in a report took hours, and a head of width -1 was called a bug."""
    visited: set[type] = set()
    open_places = set()
    for structure in structures():
        for place, kind in numbers(inspect.type_info(structure), structure.__name__, visited):
            if isinstance(kind, (inspect.IntType, inspect.FloatType)):
                lower = kind.gt if kind.ge is None else kind.ge
                upper = kind.lt if kind.le is None else kind.le
                if lower is not None and upper is not None:
                    continue
            open_places.add(place)
    assert len(visited) > 60
    assert open_places == FREE.keys()


@pytest.mark.parametrize("text", ['{"a": [0, {"b": N}]}', '{"N": N}'])
def test_no_integer_is_longer_than_any_field_bears(text: str) -> None:
    for digits in (MOST_DIGITS + 1, 400, 5000):
        for sign in ("", "-"):
            with pytest.raises(Refused, match=r"[Ii]nteger"):
                decode_json(text.replace("N", sign + "9" * digits), Json)
    decode_json('{"a": 18446744073709551615}', Json)
