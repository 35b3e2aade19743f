"""Trained networks that come with the package: `certvit/NAME`.

The folder is the list: certcli/embedded/checkpoints/NAME.safetensors, described by the README there.
"""

from importlib.resources import files
from pathlib import Path

from certcli.system.reading import is_absent

PREFIX = "certvit/"
ENDING = ".safetensors"


def shipped_names() -> list[str]:
    """Return the names of the networks that come with the package, sorted."""
    return sorted(
        f"{PREFIX}{file.name.removesuffix(ENDING)}" for file in _folder().glob(f"*{ENDING}")
    )


def shipped_path(source: str) -> Path | None:
    """Return the file of `certvit/NAME`; None for other names, and where a file has this name."""
    if source not in shipped_names() or not is_absent(Path(source)):
        return None
    return _folder() / f"{source.removeprefix(PREFIX)}{ENDING}"


def _folder() -> Path:
    return Path(str(files("certcli").joinpath("embedded/checkpoints")))
