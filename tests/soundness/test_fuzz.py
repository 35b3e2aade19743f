"""Hundreds of hostile files in seconds (`make soundness`: 100,000): read or refused, no bug, no hang, nothing opened."""

import json
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent / "fuzz.py"


def test_mutants_are_read_or_refused() -> None:
    done = subprocess.run([sys.executable, str(FUZZ), "--count", "400"], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert (found["unexpected"], found["hangs"], found["opened"]) == ([], [], {})
    refused = sum(count for outcome, count in found["outcomes"].items() if "refused" in outcome)
    assert 200 < refused < 400, "mutants that all pass, or all fail at the first byte, test nothing"


def test_the_watch_sees_what_it_should(tmp_path: Path) -> None:
    """A campaign that opens the bait, another file, a socket and a process is not clean."""
    code = (
        "import sys, pathlib, pickle, socket, subprocess\n"
        f"sys.path.insert(0, {str(FUZZ.parent)!r})\n"
        "import fuzz\n"
        f"watch = fuzz.Watch(pathlib.Path({str(tmp_path)!r}))\n"
        f"bait = pathlib.Path({str(tmp_path)!r}, fuzz.BAIT)\n"
        "bait.write_bytes(pickle.dumps(print))\n"
        "watch.on = True\n"
        "pickle.loads(bait.read_bytes())\n"
        "open('/etc/hostname').close()\n"
        "socket.socket().close()\n"
        "subprocess.run(['true'])\n"
        "watch.on = False\n"
        "print(*(name.split()[0] for name in watch.seen))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"open", "pickle.find_class", "socket.__new__", "subprocess.Popen"} <= set(done.stdout.split())
