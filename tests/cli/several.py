"""Several commands in the same processes, which test_processes.py starts, or torchrun: `several.py
PLAN.json FOLDER`.

The plan is a list of word lists; each rank leaves its exit codes in FOLDER/codes.RANK.json.
At the word FAIL, rank 1 alone is made to fail. At KEEP the state of a training run stays where it
is when it has served, and each rank leaves in FOLDER/held.RANK.json how many of how many weights it
holds.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from certcli.certify.lipschitz import LipschitzCertifier
from certcli.checkpoint import outputs
from certcli.cli.main import run
from certcli.finetune import shards
from certcli.models.pixels import PixelModel
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


@contextmanager
def kept(note: Path) -> Iterator[None]:
    """Inside the block training leaves its state behind, and says here what share of the weights it
    holds.
    """
    discard = outputs.discard_state
    share_out = shards.share_out

    def weighed(model: PixelModel, *given: Any) -> None:
        share_out(model, *given)
        held = [[shards.rows_here(weight).numel(), weight.numel()] for weight in model.parameters()]
        note.write_text(json.dumps([sum(column) for column in zip(*held, strict=True)]))

    outputs.discard_state, shards.share_out = (lambda *_: None), weighed
    try:
        yield
    finally:
        outputs.discard_state, shards.share_out = discard, share_out


def run_plan(plan: list[list[str]], folder: Path) -> None:
    """Run the commands of the plan as the process that the environment names."""
    rank = int(os.environ["RANK"])
    codes = []
    for words in plan:
        if words[0] == "FAIL":
            break_rank_1(rank)
        sys.argv = ["certvit", *(word for word in words if word not in ("FAIL", "KEEP"))]
        try:
            with kept(folder / f"held.{rank}.json") if words[0] == "KEEP" else nullcontext():
                run()
        except SystemExit as stop:
            codes.append(stop.code)
        (folder / f"codes.{rank}.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("CERTVIT_TEST_THREADS", "1")))  # as in conftest.py
    run_plan(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
