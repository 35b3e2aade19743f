"""The relaxations, one rule a module or operation; everything else is refused by name."""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)

# isort: split
from certcli.enclosure.zonotopes.rules import attention, layers  # noqa: F401 (for their decorators)
