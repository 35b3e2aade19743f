"""Proofs that are made once, for tests of what is written about them."""

from collections.abc import Iterator

import pytest

from tests.helpers.proven import proofs_made_once


@pytest.fixture(scope="module")
def proven_once() -> Iterator[None]:
    with proofs_made_once(certificates=False):
        yield
