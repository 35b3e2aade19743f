"""One theorem a rule; the table says which module, function or method it speaks of."""

import certcli.compat  # noqa: F401 (before anything here imports timm)
