"""The norms domain: balls around one forward pass. Rules register when their files are imported."""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)

# isort: split
from certcli.enclosure.balls import attention, layers  # noqa: F401 (for their decorators)
