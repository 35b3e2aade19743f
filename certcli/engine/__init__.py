"""What every domain shares: the traced graph, the table of rules, and the walk that joins them."""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)
