import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)
