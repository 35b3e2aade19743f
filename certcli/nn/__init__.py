"""The Lipschitz building blocks, and reference networks registered with timm."""

import certcli.system.compat  # noqa: F401 (before anything here imports timm)
