"""From a plain vision transformer to a Lipschitz-continuous one."""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)
