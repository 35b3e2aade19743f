"""What torchrun starts for test_processes.py: several commands in the same processes, since starting them takes longest.

`several.py PLAN.json FOLDER`: the plan is a list of word lists; each rank leaves its exit codes in FOLDER/codes.RANK.json.
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
from certcli.errors import DataError


def break_rank_1(rank: int) -> None:
    """From here on rank 1 finds an image that it cannot read, and rank 0 is slow enough for it to come to that."""
    whole = LipschitzCertifier.batch

    def batch(self: LipschitzCertifier, *given: Any) -> Any:
        if rank == 1:
            raise DataError("image 7 is broken", "remove it")
        time.sleep(0.2)
        return whole(self, *given)

    LipschitzCertifier.batch = batch  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    plan, folder, rank = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(os.environ["RANK"])
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
    main()
