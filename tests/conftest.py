"""Small real things that many tests share: a plain digits ViT, its adapted form, and a certified
net, all trained here.

The process that hands tests to workers reads this file, too: torch is imported where tests are
collected.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint
    from tests.helpers.workshop import Workshop

# workers of pytest-xdist are given a terminal's width, which they have not: outputs are then as
# wide as in a pipe
os.environ.pop("COLUMNS", None)

# compiled code is kept: without it each worker and each command in a process of its own compiles
# everything again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.set_threshold(50_000)  # few objects die in cycles


def pytest_collectstart() -> None:
    _prepare()


def pytest_collection_finish() -> None:
    gc.collect()
    # the half million objects of torch and of the tests: each full collection would walk over them
    gc.freeze()


@functools.cache
def _prepare() -> None:
    import torch
    from hypothesis import HealthCheck, settings

    import certcli.system.compat  # noqa: F401 (before a test imports timm)
    from certcli.cli.shared.output import Sink
    from tests.helpers.grids import EVERY

    if not torch.cuda.is_available():
        torch.cuda.manual_seed_all = lambda seed: (
            None
        )  # it keeps a stack trace for later in each call

    # by default a drawn case that takes .2 s fails, as on a busy machine any may, and no two runs
    # draw the same cases
    settings.register_profile(
        "cases",
        max_examples=1000 if EVERY else 50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("cases")

    Sink.clock = staticmethod(float)  # it stands at 0: no output depends on how fast a machine is

    # tiny tensors: a second thread costs more than it gives; `make test-elsewhere` asks for other
    # numbers
    torch.set_num_threads(int(os.environ.get("CERTVIT_TEST_THREADS", "1")))
    _seed()


def _seed() -> None:
    """Every test begins with the same generators, whatever ran before it."""
    import numpy as np
    import torch

    torch.default_generator.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


UNWATCHED = {b"PYTEST_CURRENT_TEST": b"", b"TORCHINDUCTOR_CACHE_DIR": b""}
"""Set by pytest for each test, and by torch as it is first compiled with."""


def interpreter_state() -> dict[str, Any]:
    """Return the things that a test must leave as it found them."""
    import torch
    from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "modes": (_len_torch_dispatch_stack(), _len_torch_function_stack()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.get_float32_matmul_precision(),
        ),
        "folder": os.getcwd(),
        "environment": {**os.environ._data, **UNWATCHED},  # undecoded: a twentieth of the time
        "math": {name: value for name, value in vars(math).items() if callable(value)},
        "arguments": list(sys.argv),
        "streams": (sys.stdout, sys.stderr) == (sys.__stdout__, sys.__stderr__),
        "timers": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    }


def _restore(before: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(before["threads"][0])
    torch.set_default_dtype(before["dtype"])
    torch.set_grad_enabled(before["gradients"])
    os.chdir(before["folder"])
    os.environ.clear()
    os.environ.update(
        {os.fsdecode(name): os.fsdecode(text) for name, text in before["environment"].items()}
    )
    sys.argv[:] = before["arguments"]
    vars(math).update(before["math"])


def changed_parts(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name, value in before.items():
        if isinstance(value, dict):
            yield from changed_parts(
                {key: value.get(key) for key in value | after[name]}, after[name]
            )
        elif after.get(name) != value:
            yield f"{name}: {after.get(name)}, before {value}"


LAST = ["the first test"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Fail the test before which gradients are off: fixtures of a module and collected generators
    work between the tests, and all later tests would run without gradients.
    """
    _require_gradients(f"after {LAST[0]}")
    yield
    _require_gradients(f"by the fixtures of {item.nodeid}")
    LAST[0] = item.nodeid


def _require_gradients(when: str) -> None:
    import torch

    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail(f"gradients were switched off {when}")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Fail the test that leaves the interpreter otherwise than it found it: the next one would run
    in another world.
    """
    before = interpreter_state()
    yield
    _seed()  # here, so that fixtures of a module find it too
    try:
        after = interpreter_state()
    except FileNotFoundError:
        after = {**before, "folder": "one that is gone"}
    if after != before:
        _restore(before)
        pytest.fail(
            f"the test left the interpreter changed: {'; '.join(changed_parts(before, after))}"
        )


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    from tests.helpers.workshop import Workshop

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # one for all workers
    (folder / "workshop").mkdir(exist_ok=True)
    return Workshop(folder / "workshop")


@pytest.fixture(scope="session")
def plain(workshop: Path) -> Checkpoint:
    from certcli.checkpoint.file import Checkpoint

    return Checkpoint.read(workshop / "plain.safetensors")


@pytest.fixture(scope="session")
def certified(workshop: Path) -> Checkpoint:
    from certcli.checkpoint.file import Checkpoint

    return Checkpoint.read(workshop / "certified.safetensors")


@pytest.fixture
def tiny() -> Checkpoint:
    """A fresh, untrained plain ViT for 8 x 8 images."""
    from certcli.models import build
    from tests.helpers.workshop import TINY

    net = build.create("certvit_vit_digits", TINY, initialise=False)
    return build.initialise("certvit_vit_digits", TINY, build.spec_of(net), 10, seed=0)
