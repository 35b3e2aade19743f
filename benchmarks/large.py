"""Memory of commands on networks larger than it: python benchmarks/large.py make FOLDER, then run
FOLDER -- COMMAND ...

Linux only. `make` writes a plain ViT with random weights (normal, of standard deviation .02) in
shards with an index and a config.json, a tensor at a time. `run` starts certvit with FOLDER as its
checkpoint and looks at it every .2 s: its own memory (anonymous pages, which only swap could take),
and the pages of files that it has mapped, which the system drops or writes back when memory is
short.

--limit SIZE runs it in a memory control group of that size, pages of files included (version 1,
made and removed here, which takes root; with version 2: `systemd-run --scope -p MemoryMax=4G -p
MemorySwapMax=0` before the whole line): what needs more is killed. FOLDER's pages are dropped
first, for what was in memory before would be on another's account. --most SIZE only has the pages
dropped whenever both together are more: the command must go on with them gone.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from certcli.checkpoint.tensor_files import INDEX
from certcli.cli.shared.inputs import size_in_bytes
from certcli.models import build

ARCH = "vit_base_patch16_224"
GROUPS = Path("/sys/fs/cgroup/memory")
PAUSE = 0.2
SPREAD = 0.02
# of Linux, on every architecture
PROCESS_MADVISE = 440
PIDFD_OPEN = 434
PAGE_OUT = 21


def make(
    folder: Path, width: int, depth: int, side: int, ratio: int, dtype: torch.dtype, shard: int
) -> None:
    """The shards, the index and config.json."""
    arguments = {
        "embed_dim": width,
        "depth": depth,
        "num_heads": width // 64,
        "img_size": side,
        "mlp_ratio": ratio,
    }
    with torch.device("meta"):
        net = build.create(ARCH, arguments, initialise=False)
    shapes = {name: tuple(value.shape) for name, value in sorted(net.state_dict().items())}
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    size_so_far = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if parts[-1] and size_so_far + size > shard:
            parts.append({})
            size_so_far = 0
        parts[-1][name] = shape
        size_so_far += size
    generator = torch.Generator().manual_seed(0)
    place = {}
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        _write(folder / file, part, dtype, generator)
        place |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": place}))
    pixels = {
        "input_size": [3, side, side],
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "num_classes": 1000,
    }
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architecture": ARCH,
                "num_classes": 1000,
                "model_args": arguments,
                "pretrained_cfg": pixels,
            }
        )
    )
    total = sum(math.prod(shape) for shape in shapes.values())
    print(f"{total:,} numbers, {total * dtype.itemsize / 1e9:.2f} GB in {len(parts)} files")


def _write(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, generator: torch.Generator
) -> None:
    """One safetensors file; a tensor is made, written and forgotten."""
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    header = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator) * SPREAD
            if "norm" in name and name.endswith("weight"):
                value += 1.0
            file.write(value.to(dtype).reshape(-1).view(torch.uint8).numpy().data)


def run(folder: Path, words: list[str], limit_bytes: int | None, limit: int | None) -> int:
    """The command's exit code; what it needed is printed."""
    started = time.perf_counter()
    group = None if limit is None else _group(limit)
    for file in folder.glob("*.safetensors") if group is not None else ():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    process = subprocess.Popen(
        [sys.executable, "-m", "certcli", words[0], str(folder), *words[1:]],
        preexec_fn=None if group is None else lambda: _enter(group),
    )
    peaks: dict[str, int] = {}
    drops = 0
    try:
        while process.poll() is None:
            now = _memory(process.pid)
            if limit_bytes is not None and now["own"] + now["files"] > limit_bytes:
                _drop(process.pid)
                drops += 1
            for name, value in (*now.items(), ("both", now["own"] + now["files"])):
                peaks[name] = max(peaks.get(name, 0), value)
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak_text = ", ".join(f"{name} {value / 1e9:.2f} GB" for name, value in peaks.items())
    print(f"peak: {peak_text}" + ("" if limit_bytes is None else f"; pages dropped {drops} times"))
    if group is not None:
        top, allowed = (_number(group, f"{name}_in_bytes") / 1e9 for name in ("max_usage", "limit"))
        print(
            f"group: peak {top:.2f} of {allowed:.2f} GB, {_number(group, 'failcnt'):,} times at the limit"
        )
        print(f"exit code {process.returncode}")
        group.rmdir()
    print(
        f"{used.ru_utime + used.ru_stime:.0f} CPU seconds, {time.perf_counter() - started:.0f} s by the clock"
    )
    return process.returncode


def _group(limit: int) -> Path:
    """A new memory control group, without swap."""
    group = GROUPS / f"certvit-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit))
    (group / "memory.swappiness").write_text("0")
    return group


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _number(group: Path, name: str) -> int:
    return int((group / f"memory.{name}").read_text())


def _memory(pid: int) -> dict[str, int]:
    """Bytes: its own, and of mapped files (shared memory among them)."""
    usage = {"own": 0, "files": 0}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            kind = {"RssAnon": "own", "RssFile": "files", "RssShmem": "files"}.get(name)
            if kind is not None:
                usage[kind] += 1024 * int(value.split()[0])
    return usage


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _drop(pid: int) -> None:
    """Ask the system to take the pages of the process's large mapped files, as it would were memory
    short.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.syscall(PIDFD_OPEN, pid, 0)
    if handle < 0:
        return
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, _, _, _, inode, *_ = line.split()
            start, end = (int(part, 16) for part in span.split("-"))
            if inode != "0" and end - start > 2**22 and ".so" not in line:
                piece = _Range(start, end - start)
                libc.syscall(PROCESS_MADVISE, handle, ctypes.byref(piece), 1, PAGE_OUT, 0)
    os.close(handle)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    making = parts.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--width", type=int, default=1280)
    making.add_argument("--depth", type=int, default=127)
    making.add_argument("--side", type=int, default=224)
    making.add_argument("--mlp-ratio", type=int, default=4)
    making.add_argument("--dtype", default="float32")
    making.add_argument("--shard-size", default="2GB")
    running = parts.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--most")
    running.add_argument("--limit")
    running.add_argument("words", nargs="+")
    options = parser.parse_args()
    if options.part == "make":
        shard = size_in_bytes("--shard-size", options.shard_size)
        make(
            options.folder,
            options.width,
            options.depth,
            options.side,
            options.mlp_ratio,
            getattr(torch, options.dtype),
            shard,
        )
        return 0
    limit_bytes = None if options.most is None else size_in_bytes("--most", options.most)
    return run(
        options.folder,
        options.words,
        limit_bytes,
        None if options.limit is None else size_in_bytes("--limit", options.limit),
    )


if __name__ == "__main__":
    raise SystemExit(main())
