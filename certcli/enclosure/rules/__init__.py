"""What has a relaxation, one rule a module or operation; everything else is refused by name."""

import certcli.compat  # noqa: F401 (before anything here imports timm)

# isort: split
from certcli.enclosure.rules import layers, shapes, sums  # noqa: F401 (for their decorators)
