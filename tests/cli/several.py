"""Several commands in the same processes, which test_processes.py starts, or torchrun: `several.py
PLAN.json FOLDER`.

The plan is a list of word lists; each rank leaves its exit codes in FOLDER/codes.RANK.json.
At the word FAIL, rank 1 alone is made to fail.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from certcli.certify.lipschitz import LipschitzCertifier
from certcli.cli.main import run
from certcli.system import errors, processes


def break_rank_1(rank: int) -> None:
    """From here on rank 1 finds an image that it cannot read, and rank 0 takes its first one when
    that has been said.
    """
    whole = LipschitzCertifier.batch

    def batch(self: LipschitzCertifier, *given: Any) -> Any:
        if rank == 1:
            raise errors.DataError("image 7 is broken", "remove it")
        while not processes.team()._store.check(["code"]):
            time.sleep(0.01)
        return whole(self, *given)

    LipschitzCertifier.batch = batch  # type: ignore[method-assign]


def run_plan(plan: list[list[str]], folder: Path) -> None:
    """Run the commands of the plan as the process that the environment names."""
    rank = int(os.environ["RANK"])
    codes = []
    for words in plan:
        if words[0] == "FAIL":
            break_rank_1(rank)
        sys.argv = ["certvit", *(word for word in words if word != "FAIL")]
        try:
            run()
        except SystemExit as stop:
            codes.append(stop.code)
        (folder / f"codes.{rank}.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("CERTVIT_TEST_THREADS", "1")))  # as in conftest.py
    run_plan(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
