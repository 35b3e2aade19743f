"""Assertions about networks for pytest: `from certvit.testing import assert_certified`. Documented
in docs/api.md.
"""

from certcli.testing import NotDecidedError, assert_bound, assert_certified, assert_robust

__all__ = ["NotDecidedError", "assert_bound", "assert_certified", "assert_robust"]
