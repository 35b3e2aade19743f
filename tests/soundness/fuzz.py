"""Hostile files by the thousand: `python tests/soundness/fuzz.py --count 100000`.

Each mutant may be read or refused, and nothing else.

Counted, and 0 wherever the door holds: exceptions that are not certvit's own, mutants that take longer than TOO_LONG, and
files, sockets or processes beyond the input, which an audit hook of the interpreter sees whoever opens them.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Replacement
from certcli.checkpoint.schema import ReportFields, decode
from certcli.cli.main import run
from certcli.finetune.loop import Trainer
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.state import load_state, save_state
from certcli.images import datasets
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.system.errors import CertvitError
from certcli.verification.laws import verify_laws

TOO_LONG = 20  # CPU seconds of one mutant: a hang, or a file that asks for more than it holds
TOO_STILL = 600  # seconds on the wall: waiting for what never comes
TINY = {"embed_dim": 8, "depth": 1, "num_heads": 2, "patch_size": 4}
BAIT = "evil.pth"
DIGITS = ("--dataset", "digits", "--limit", "2")
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 255, 1000, 10**6, 10**12, 10**30, 2**63, 0.5, -0.5, 1e-30, 1e308, 127.5),
    *(
        "",
        "x",
        "1",
        "é\u202e",
        "\x1b[31m",
        "x" * 3000,
        BAIT,
        f"../{BAIT}",
        f"./{BAIT}",
        "hf-hub:a/b",
        "local-dir:.",
        "digits",
    ),
    *("http://127.0.0.1:9/x.pth", "builtins.print", "torch/mnist", "vit_giant_patch14_224", "certvit_4c3f", "relu"),
    *([], {}, [1], [0.5, 0.5, 0.5], [[]], {"a": 1}, [10**6] * 3, {"path": "", "kind": "relu", "args": {}}, [None]),
]
KEYS = (
    *(
        "checkpoint_path",
        "pretrained",
        "pretrained_cfg",
        "cache_dir",
        "features_only",
        "scriptable",
        "depth",
        "embed_dim",
    ),
    *(
        "img_size",
        "patch_size",
        "num_classes",
        "act_layer",
        "norm_layer",
        "block_fn",
        "device",
        "mlp_ratio",
        "global_pool",
    ),
    *("class_token", "reg_tokens", "qk_norm", "init_values", "weight_init", "dynamic_img_size", "surgery", "x", ""),
)
TOKENS = ("NaN", "Infinity", "-Infinity", "1e999", "[" * 5000, '{"a":' * 3000, "\\ud800", "\x00", "'", "\ufeff", "0x10")


class Hang(BaseException):
    """No Exception, so that no handler of certvit's or of a library's takes it for a refusal."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in places(part, (*path, key)))]


def mutate_json(text: str, rng: random.Random) -> str:
    """One to three changes of values, keys or characters."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.1:
            position = rng.randrange(len(text) + 1)
            text = text[:position] + rng.choice(TOKENS) + text[position + rng.randrange(3) :]
            continue
        try:
            root = [json.loads(text)]
        except (ValueError, RecursionError):
            return text
        *way, last = rng.choice([path for path in places(root) if path])
        place: Any = root
        for key in way:
            place = place[key]
        if kind < 0.65:
            place[last] = rng.choice(VALUES)
        elif kind < 0.8 and way:
            del place[last]
        elif isinstance(place[last], dict):
            place[last][rng.choice(KEYS)] = rng.choice(VALUES)
        elif isinstance(place[last], list):
            place[last].append(rng.choice(VALUES))
        elif isinstance(place[last], (int, float)):
            place[last] = place[last] * rng.choice((-1, 2, 10, 0.5, 1e6)) if abs(place[last]) < 1e9 else 0
        if not root:
            return ""
        text = json.dumps(root[0])
    return text


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Cut, flip, overwrite or insert; the header more often than the rest."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        position = rng.randrange(max(1, min(len(found), 2000) if rng.random() < 0.7 else len(found)))
        kind = rng.random()
        if kind < 0.2:
            del found[position:]
        elif kind < 0.6 and found:
            found[position % len(found)] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            found[position : position + 8] = rng.randbytes(8)
        else:
            found[position:position] = rng.randbytes(rng.randrange(1, 20))
    return bytes(found)


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int8, torch.uint8, torch.bool),
)


def mutate_tensors(tensors: dict[str, torch.Tensor], rng: random.Random) -> dict[str, torch.Tensor]:
    """Another type, shape, name or value of one tensor."""
    name = rng.choice(list(tensors))
    value = tensors[name]
    kind = rng.randrange(6)
    if kind == 0:
        value = value.to(rng.choice(DTYPES))
    elif kind == 1:
        value = rng.choice((value.flatten(), value.unsqueeze(0), value[:0], torch.zeros(()), torch.zeros(3, 3)))
    elif kind == 2:
        value = value * rng.choice((float("nan"), float("inf"), 3e38, 1e-40, -1.0, 0.0))
    elif kind == 3:
        return {
            **{key: part for key, part in tensors.items() if key != name},
            rng.choice(("\x1b", "", "x" * 999)): value,
        }
    elif kind == 4:
        return {key: part for key, part in tensors.items() if key != name}
    else:
        value = torch.zeros(rng.choice(((0,), (1000, 1000), (1,) * 30)))
    return {**tensors, name: value.contiguous()}


class Laboratory:
    """A good file of every kind in one folder, and for each kind how it is spoiled and who reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code = folder, 0
        spec = InputSpec((1, 8, 8), (0.5,), (0.5,))
        plain = build.initialise("certvit_vit_digits", TINY, spec, 10, seed=0)
        made = plain.derive(plain.tensors, "init", {"arch": "x"}).with_evidence(
            "lipschitz", {"images": 4}, {"upper": 9e9, "log10_upper": 9.95, "lower": 1.0}
        )
        self.tensors = dict(plain.tensors)
        # a surgery that keeps the tensors: what is read and mutated are records with all of their parts
        record = build.Record(**{**vars(made.record), "surgery": (Replacement("blocks.0.mlp.act", "relu"),)})
        self.record = Checkpoint(self.tensors, record).record.to_json()
        self.config = json.dumps(
            {
                "architecture": "certvit_vit_digits",
                "num_classes": 10,
                "model_args": TINY,
                "pretrained_cfg": {"input_size": [1, 8, 8], "mean": [0.5], "std": [0.5], "crop_pct": 1.0},
            }
        )
        (folder / "hub").mkdir()
        safetensors.torch.save_file(self.tensors, folder / "hub" / "model.safetensors")
        (folder / BAIT).write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
        self.write(folder / "good.safetensors", self.record)
        self.whole = (folder / "good.safetensors").read_bytes()
        names = sorted(self.tensors)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        (folder / "cut").mkdir()
        for file, part in shards.items():
            own = {name: self.tensors[name] for name in part}
            safetensors.torch.save_file(own, folder / "cut" / file, {"certvit": self.record})
        weight_map = {name: file for file, part in shards.items() for name in part}
        size = sum(value.nbytes for value in self.tensors.values())
        about = {"total_size": size, "certvit": self.record}
        self.index = json.dumps({"metadata": about, "weight_map": weight_map})
        self.say(
            "certify", "good.safetensors", *DIGITS, "-e", "0.1", "--method", "lipschitz", "--records", "good.jsonl"
        )
        self.lines = (folder / "good.jsonl").read_text().splitlines()
        self.report = self.say("lipschitz", "good.safetensors", "--no-estimate", "--json")
        trainer = Trainer(build.load(plain, writable=True), FinetuneSettings(loss="ce"), 10, "0" * 64)
        save_state(folder / "good.state", trainer.state())
        self.state = (folder / "good.state").read_bytes()
        (folder / "images" / "a").mkdir(parents=True)
        (folder / "table").mkdir()
        rows = np.arange(64, dtype=np.uint8).reshape(8, 8)
        self.pictures = []
        for suffix, values in (
            ("png", rows),
            ("png", rows.astype(np.uint16) * 900),
            ("tif", rows),
            ("bmp", rows),
            ("pgm", rows),
        ):
            handle = io.BytesIO()
            Image.fromarray(values).save(handle, {"png": "PNG", "tif": "TIFF", "bmp": "BMP", "pgm": "PPM"}[suffix])
            self.pictures.append((suffix, handle.getvalue()))
        (folder / "table" / "x.png").write_bytes(self.pictures[0][1])
        self.spec = spec

    def write(self, path: Path, record: str, tensors: dict[str, torch.Tensor] | None = None) -> None:
        safetensors.torch.save_file(tensors or self.tensors, path, {"certvit": record})

    def say(self, *words: str) -> str:
        """A command in this process; SystemExit carries its code."""
        out, self.code = io.StringIO(), 0
        sys.argv = ["certvit", *words]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            try:
                run()
            except SystemExit as stop:
                self.code = int(stop.code or 0)
                if self.code == 1:
                    raise RuntimeError(f"'{' '.join(words)}' ended in a bug") from stop
        return out.getvalue()

    def of_record(self, rng: random.Random) -> None:
        size = int.from_bytes(self.whole[:8], "little")
        header = json.loads(self.whole[8 : 8 + size])
        header["__metadata__"] = {"certvit": mutate_json(self.record, rng)}
        text = json.dumps(header).encode()
        Path("m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + self.whole[8 + size :])
        self.use(rng)

    def of_tensors(self, rng: random.Random) -> None:
        self.write(Path("m.safetensors"), self.record, mutate_tensors(self.tensors, rng))
        self.use(rng)

    def of_bytes(self, rng: random.Random) -> None:
        Path("m.safetensors").write_bytes(mutate_bytes(self.whole, rng))
        self.use(rng)

    def use(self, rng: random.Random) -> None:
        """Mostly the reading alone; now and then the commands that read."""
        if rng.random() < 0.995:
            build.load(open_checkpoint("m.safetensors"))
            return
        self.say("lipschitz", "m.safetensors", "--no-estimate")
        self.say("log", "m.safetensors", "--json")
        self.say("log", "m.safetensors", "--verify")
        self.say("certify", "m.safetensors", "--dataset", "digits", "--limit", "4")

    def of_index(self, rng: random.Random) -> None:
        text = mutate_json(self.index, rng)
        Path("cut/model.safetensors.index.json").write_text(text, errors="replace")
        build.load(open_checkpoint("cut/model.safetensors.index.json"))

    def of_records(self, rng: random.Random) -> None:
        """A file of records with one changed line: checked, or gone on with."""
        place = rng.randrange(len(self.lines))
        lines = [*self.lines[:place], mutate_json(self.lines[place], rng), *self.lines[place + 1 :]]
        Path("m.jsonl").write_text("\n".join(lines) + "\n", errors="replace")
        self.say("certify", "good.safetensors", *DIGITS, "--verify", "m.jsonl")
        self.say(
            "certify",
            "good.safetensors",
            *DIGITS,
            "-e",
            "0.1",
            "--method",
            "lipschitz",
            "--records",
            "m.jsonl",
            "--resume",
        )

    def of_audit(self, rng: random.Random) -> None:
        """A mutant of the record, audited."""
        self.write(Path("m.safetensors"), mutate_json(self.record, rng))
        words = ("-e", "0.1", "-a", "fgsm", "--time-budget", "1s", "--json")
        self.say("audit", "m.safetensors", *DIGITS, *words)

    def of_config(self, rng: random.Random) -> None:
        Path("hub/config.json").write_text(mutate_json(self.config, rng), errors="replace")
        build.load(open_checkpoint("hub"))

    def of_report(self, rng: random.Random) -> None:
        verify_laws(decode(mutate_json(self.report, rng), ReportFields))

    def of_state(self, rng: random.Random) -> None:
        Path("m.state").write_bytes(mutate_bytes(self.state, rng))
        load_state(Path("m.state"), "0" * 64)

    def of_image(self, rng: random.Random) -> None:
        suffix, content = rng.choice(self.pictures)
        for old in Path("images/a").iterdir():
            old.unlink()
        Path(f"images/a/x.{suffix}").write_bytes(mutate_bytes(content, rng))
        datasets.load("images", self.spec, "all").tensors()

    def of_table(self, rng: random.Random) -> None:
        good = b"file,class\nx.png,1\nx.png,2\n"
        Path("table/labels.csv").write_bytes(
            mutate_bytes(good, rng).replace(b"png,", rng.choice((b"png,", b"png", b"/../x")))
        )
        datasets.load("table", self.spec, "all").tensors()


KINDS = {
    "record": 40, "config": 13, "bytes": 11, "tensors": 9, "index": 9, "report": 6, "state": 4, "image": 5, "table": 3,
    "records": 2, "audit": 0.5,
}  # fmt: skip


class Watch:
    """What the interpreter is asked for while a mutant is read: files elsewhere, the bait, processes, sockets, pickles."""

    EVENTS = (
        "subprocess",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "socket.",
        "pickle.find_class",
        "shutil.",
    )
    FREE = (
        sys.prefix,
        sys.base_prefix,
        str(Path(__file__).parents[2]),
        "/proc/",
        "/sys/",
        "/dev/null",
        "/dev/urandom",
    )

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, self.on = str(folder), collections.Counter[str](), False
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event.startswith(self.EVENTS):
            self.seen[f"{event} {args!r:.80}"] += 1
        elif event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(args[0]))
            if path.endswith(BAIT) or not path.startswith((self.folder, *self.FREE)):
                self.seen[f"open {path}"] += 1


def campaign(count: int, seed: int, folder: Path, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """What happened to `count` mutants."""
    os.chdir(folder)
    laboratory, rng = Laboratory(folder), random.Random(seed)
    outcomes, unexpected, slow = collections.Counter[str](), [], []

    def stop(number: int, frame: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGPROF, stop)
    watch, started = Watch(folder), time.perf_counter()
    for number in range(count):
        own = random.Random(rng.random())
        kind = own.choices(list(KINDS), list(KINDS.values()))[0]
        laboratory.code = 0
        watch.on, clock = True, time.process_time()
        signal.setitimer(signal.ITIMER_PROF, TOO_LONG)
        signal.alarm(TOO_STILL)
        try:
            getattr(laboratory, f"of_{kind}")(own)
            outcome = f"refused {laboratory.code}" if laboratory.code else "read"
        except CertvitError as refusal:
            outcome = f"refused {refusal.code}"
            if "\n" in refusal.message or "\x1b" in refusal.message:
                unexpected.append(f"{number} {kind}: a message that is no line: {refusal.message!a:.200}")
        except Hang:
            outcome = "hang"
            slow.append(f"{number} {kind}")
        except ValueError as refusal:
            outcome = "refused"
            if kind != "report":
                unexpected.append(f"{number} {kind}: {type(refusal).__name__}: {refusal!s:.200}")
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt):
                raise
            outcome = "bug"
            unexpected.append(f"{number} {kind}: {type(failure).__name__}: {failure!s:.200}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            watch.on = False
        outcomes[f"{kind}: {outcome}"] += 1
        if (taken := time.process_time() - clock) > 5:
            tell(f"{number} {kind}: {taken:.1f} s, {outcome}")
        if number % 5000 == 4999:
            tell(
                f"{number + 1} mutants, {time.perf_counter() - started:.0f} s, {len(unexpected)} bugs, {len(slow)} hangs"
            )
    return {
        "mutants": count,
        "seconds": round(time.perf_counter() - started, 1),
        "outcomes": dict(sorted(outcomes.items())),
        "unexpected": unexpected,
        "hangs": slow,
        "opened": dict(watch.seen),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found = campaign(
            asked.count, asked.seed, Path(name).resolve(), lambda line: print(line, file=sys.stderr, flush=True)
        )
        os.chdir("/")
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["unexpected"] or found["hangs"] or found["opened"]))
