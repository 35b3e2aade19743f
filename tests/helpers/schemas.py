"""JSON schemas in tests."""

from typing import Any

import pytest


def problems(value: Any, schema: dict[str, Any]) -> list[str]:
    """What is wrong with a value by a JSON schema; skips where `jsonschema`, a test dependency, is
    not installed.
    """
    jsonschema = pytest.importorskip("jsonschema")
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return [error.message for error in kind(schema).iter_errors(value)]
