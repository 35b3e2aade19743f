"""Gradients near an image as forms, pulled back through the walk that encloses the values."""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)

# isort: split
from certcli.enclosure.slopes import layers, pulls  # noqa: F401 (for their decorators)
