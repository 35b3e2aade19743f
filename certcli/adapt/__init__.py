"""From a plain vision transformer to a Lipschitz-continuous one."""

import certcli.compat  # noqa: F401 (before anything here imports timm)
