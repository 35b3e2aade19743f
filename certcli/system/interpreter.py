"""Another Python interpreter beside this one: the only place that starts one."""

import os
import subprocess
import sys
from pathlib import Path


def run_isolated(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that imports nothing from the working folder; return what it
    printed.

    The installed packages are those of this interpreter, PYTHONPATH and the user's own included:
    the code is to see what a program of the user's sees. Relative entries of PYTHONPATH are left
    out, since they name the working folder.
    """
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept_places = [place for place in places if os.path.isabs(place)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(kept_places)}
    if not kept_places:
        del environment["PYTHONPATH"]
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(sys.prefix),
        env=environment,
    )
