"""Hostile files by the thousand: `python -m tests.soundness.file_fuzz --count 100000`.

Each file is read or refused in one line. It takes no longer than TOO_LONG, and opens no other file,
socket or process: an audit hook of the interpreter sees them all.
"""

import collections
import contextlib
import importlib.util
import io
import json
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.utils.serialization.config  # torch loads it late: a file that is opened
from PIL import Image

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Replacement
from certcli.checkpoint.schema import ReportFields, decode_json
from certcli.finetune.loop import Trainer
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.state import load_training_state, save_training_state
from certcli.images import datasets
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.system.errors import CertvitError
from certcli.verification.documents import verify_laws
from tests.helpers.commands import console
from tests.models.transformers_logits import FILE, PIXELS, weights
from tests.soundness.edits import BAIT, Case, edit_bytes, edit_text, edited_onnx, run_edits

TOO_LONG = 20
"""CPU seconds of one file: a hang, or a file that asks for more than it holds. An honest one takes milliseconds."""
TOO_STILL = 600
"""Seconds on the wall: the program waits for something that never comes."""
TINY = {"embed_dim": 8, "depth": 1, "num_heads": 2, "patch_size": 4}
SPEC = InputSpec((1, 8, 8), (0.5,), (0.5,))
CERTIFY = ("certify", "good.safetensors", "--dataset", "digits", "--limit", 2)
RECORDS = ("-e", "0.1", "--method", "lipschitz", "--records")
AUDIT = (
    "--dataset",
    "digits",
    "--limit",
    2,
    "-e",
    "0.1",
    "-a",
    "fgsm",
    "--time-budget",
    "1s",
    "--json",
)
DTYPES = (
    *(
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(torch.int64, torch.int8, torch.uint8, torch.bool),
)


class Hang(BaseException):
    """No Exception, so that no handler of certvit's or of a library's takes it for a refusal."""


def edit_tensors(tensors: dict[str, torch.Tensor], rng: random.Random) -> dict[str, torch.Tensor]:
    """Return the tensors with another type, shape, name or value of one of them, or without it."""
    name = rng.choice(list(tensors))
    kind = rng.randrange(6)
    value = tensors[name]
    others = {key: part for key, part in tensors.items() if key != name}
    if kind == 0:
        value = value.to(rng.choice(DTYPES))
    elif kind == 1:
        value = rng.choice(
            (value.flatten(), value.unsqueeze(0), value[:0], torch.zeros(()), torch.zeros(3, 3))
        )
    elif kind == 2:
        value = value * rng.choice((float("nan"), float("inf"), 3e38, 1e-40, -1.0, 0.0))
    elif kind == 3:
        name = rng.choice(("\x1b", "", "x" * 999))
    elif kind == 4:
        return others
    else:
        value = torch.zeros(rng.choice(((0,), (1000, 1000), (1,) * 30)))
    return {**others, name: value.contiguous()}


def run_command(*words: object) -> tuple[int, str]:
    """Return the exit code and the output of a command that must not end in a bug."""
    done = console(*words)
    if done.code == 1:
        raise RuntimeError(f"'{' '.join(map(str, words))}' ended in a bug: {done.err}")
    return done.code, done.out


class Laboratory:
    """A good file of every kind in the current folder; the methods of KINDS spoil it, read it, and
    return an exit code.
    """

    def __init__(self) -> None:
        plain = build.initialise("certvit_vit_digits", TINY, SPEC, 10, seed=0)
        self.tensors = dict(plain.tensors)
        evidence = {"upper": 9e9, "log10_upper": 9.95, "lower": 1.0}
        made = plain.derive(plain.tensors, "init", {"arch": "x"}).with_evidence(
            "lipschitz", {"images": 4}, evidence
        )
        # a surgery that keeps the tensors: the record that is read and edited has all of its parts
        record = build.Record(
            **{**vars(made.record), "surgery": (Replacement("blocks.0.mlp.act", "relu"),)}
        )
        self.record = Checkpoint(self.tensors, record).record.to_json()
        pretrained = {"input_size": [1, 8, 8], "mean": [0.5], "std": [0.5], "crop_pct": 1.0}
        config = {"architecture": "certvit_vit_digits", "num_classes": 10, "model_args": TINY}
        self.config_text = json.dumps({**config, "pretrained_cfg": pretrained})
        Path(BAIT).write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
        for folder in ("hub", "cut", "images/a", "table", "foreign"):
            Path(folder).mkdir(parents=True)
        safetensors.torch.save_file(self.tensors, "hub/model.safetensors")
        self.write("good.safetensors", self.record)
        self.whole = Path("good.safetensors").read_bytes()
        names = sorted(self.tensors)
        weight_map = dict.fromkeys(names[::2], "a.safetensors") | dict.fromkeys(
            names[1::2], "b.safetensors"
        )
        for file in ("a.safetensors", "b.safetensors"):
            own = {name: self.tensors[name] for name in names if weight_map[name] == file}
            self.write(f"cut/{file}", self.record, own)
        about = {
            "total_size": sum(value.nbytes for value in self.tensors.values()),
            "certvit": self.record,
        }
        self.index_text = json.dumps({"metadata": about, "weight_map": weight_map})
        self.exported = self.export(build.load(plain).net)
        run_command(*CERTIFY, *RECORDS, "good.jsonl")
        self.lines = Path("good.jsonl").read_text().splitlines()
        self.report_text = run_command("lipschitz", "good.safetensors", "--no-estimate", "--json")[
            1
        ]
        trainer = Trainer(
            build.load(plain, writable=True), FinetuneSettings(loss="ce"), 10, "0" * 64
        )
        save_training_state(Path("good.state"), trainer.state())
        self.good_state = Path("good.state").read_bytes()
        rows = np.arange(64, dtype=np.uint8).reshape(8, 8)
        self.pictures = [("png", self.picture(rows.astype(np.uint16) * 900, "PNG"))]
        self.pictures += [(end, self.picture(rows, kind)) for end, kind in
                          (("png", "PNG"), ("tif", "TIFF"), ("bmp", "BMP"), ("pgm", "PPM"))]  # fmt: skip
        Path("table/x.png").write_bytes(self.pictures[1][1])
        self.foreign = list(json.loads(FILE.read_text()).values())
        from torchvision.models import VisionTransformer  # after certcli.system.compat

        self.torchvision = dict(VisionTransformer(16, 8, 1, 2, 8, 8, num_classes=3).state_dict())

    @staticmethod
    def export(net: torch.nn.Module) -> bytes:
        """Return a network as an ONNX file; b"" where the extra `onnx` is not installed."""
        if not all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))):
            return b""
        import onnx.numpy_helper  # noqa: F401 (a file of its own, like those of every package)
        import onnxruntime  # noqa: F401

        stream = io.BytesIO()
        torch.onnx.export(net, (torch.zeros(1, 1, 8, 8),), stream, dynamo=False, opset_version=17)
        return stream.getvalue()

    @staticmethod
    def picture(pixels: np.ndarray, kind: str) -> bytes:
        handle = io.BytesIO()
        Image.fromarray(pixels).save(handle, kind)
        return handle.getvalue()

    def write(self, path: str, record: str, tensors: dict[str, torch.Tensor] | None = None) -> None:
        safetensors.torch.save_file(tensors or self.tensors, path, {"certvit": record})

    def of_record(self, rng: random.Random) -> int:
        size = int.from_bytes(self.whole[:8], "little")
        header = json.loads(self.whole[8 : 8 + size])
        header["__metadata__"] = {"certvit": edit_text(self.record, rng)}
        text = json.dumps(header).encode()
        Path("m.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + self.whole[8 + size :]
        )
        return self.use(rng)

    def of_tensors(self, rng: random.Random) -> int:
        self.write("m.safetensors", self.record, edit_tensors(self.tensors, rng))
        return self.use(rng)

    def of_bytes(self, rng: random.Random) -> int:
        Path("m.safetensors").write_bytes(edit_bytes(self.whole, rng))
        return self.use(rng)

    def use(self, rng: random.Random) -> int:
        """Read the checkpoint, and now and then run the commands that read it."""
        if rng.random() < 0.995:
            build.load(open_checkpoint("m.safetensors"))
            return 0
        run_command("lipschitz", "m.safetensors", "--no-estimate")
        run_command("log", "m.safetensors", "--json")
        run_command("verify", "m.safetensors")
        return run_command("certify", "m.safetensors", "--dataset", "digits", "--limit", 4)[0]

    def of_index(self, rng: random.Random) -> int:
        Path("cut/model.safetensors.index.json").write_text(
            edit_text(self.index_text, rng), errors="replace"
        )
        build.load(open_checkpoint("cut/model.safetensors.index.json"))
        return 0

    def of_records(self, rng: random.Random) -> int:
        """Check a file of records with one changed line, and continue its run."""
        place = rng.randrange(len(self.lines))
        lines = [*self.lines[:place], edit_text(self.lines[place], rng), *self.lines[place + 1 :]]
        Path("m.jsonl").write_text("\n".join(lines) + "\n", errors="replace")
        run_command("verify", "m.jsonl", "m.safetensors")
        return run_command(*CERTIFY, *RECORDS, "m.jsonl", "--resume")[0]

    def of_audit(self, rng: random.Random) -> int:
        self.write("m.safetensors", edit_text(self.record, rng))
        return run_command("audit", "m.safetensors", *AUDIT)[0]

    def of_config(self, rng: random.Random) -> int:
        Path("hub/config.json").write_text(edit_text(self.config_text, rng), errors="replace")
        build.load(open_checkpoint("hub"))
        return 0

    def of_transformers(self, rng: random.Random) -> int:
        row = rng.choice(self.foreign)
        texts = {"config": json.dumps(row["config"]), "preprocessor_config": json.dumps(PIXELS)}
        tensors = weights(row["shapes"])
        edited = rng.choice([*texts, "tensors"])
        if edited == "tensors":
            tensors = self.swapped(tensors, rng)
        else:
            texts[edited] = edit_text(texts[edited], rng)
        for name, text in texts.items():
            Path(f"foreign/{name}.json").write_text(text, errors="replace")
        safetensors.torch.save_file(tensors, "foreign/model.safetensors")
        build.load(open_checkpoint("foreign"))
        return 0

    def of_torch(self, rng: random.Random) -> int:
        """Read an edited state dict in a wrapping that may contain itself, by torchvision's names."""
        keys = rng.choices(("model", "state_dict", "model_ema", "module", "optimizer"), k=2)
        inner: dict[str, Any] = {keys[1]: self.swapped(self.torchvision, rng)}
        if rng.random() < 0.2:
            inner[rng.choice(("model", "ema"))] = inner
        torch.save({keys[0]: inner, "epoch": 1}, "m.pth")
        arguments = {"num_heads": rng.choice((2, 3, 0))}
        build.load(
            open_checkpoint(
                "m.pth", Hints(None, arguments, (0.5,), (0.5,), weights=rng.choice((None, "ema")))
            )
        )
        return 0

    @staticmethod
    def swapped(tensors: dict[str, torch.Tensor], rng: random.Random) -> dict[str, torch.Tensor]:
        """Edit a tensor, or give a copy of it a name that is made of two others'."""
        if rng.random() < 0.5:
            return edit_tensors(tensors, rng)
        first, second, third = rng.choices([name.split(".") for name in tensors], k=3)
        cut = rng.randrange(1, 1 + len(second))
        name = ".".join([*second[:cut], *third[cut:]]).replace(
            "0", rng.choice(("0", "1", "99999999", "x"))
        )
        return {**tensors, name: tensors[".".join(first)].clone()}

    def of_report(self, rng: random.Random) -> int:
        try:
            verify_laws(decode_json(edit_text(self.report_text, rng), ReportFields))
        except ValueError:
            return 3
        return 0

    def of_onnx(self, rng: random.Random) -> int:
        """Read an edited export, where `onnx` is installed."""
        if not self.exported:
            return 0
        Path("m.onnx").write_bytes(edited_onnx(self.exported, rng))
        build.load(open_checkpoint("m.onnx", Hints(mean=(0.5,), std=(0.5,))))
        return 0

    def of_state(self, rng: random.Random) -> int:
        Path("m.state").write_bytes(edit_bytes(self.good_state, rng))
        load_training_state(Path("m.state"), "0" * 64)
        return 0

    def of_image(self, rng: random.Random) -> int:
        ending, content = rng.choice(self.pictures)
        for old in Path("images/a").iterdir():
            old.unlink()
        Path(f"images/a/x.{ending}").write_bytes(edit_bytes(content, rng))
        datasets.load_dataset("images", SPEC, "all").tensors()
        return 0

    def of_table(self, rng: random.Random) -> int:
        rows = edit_bytes(b"file,class\nx.png,1\nx.png,2\n", rng)
        Path("table/labels.csv").write_bytes(
            rows.replace(b"png,", rng.choice((b"png,", b"png", b"/../x")))
        )
        datasets.load_dataset("table", SPEC, "all").tensors()
        return 0


KINDS = {
    "record": 40, "config": 9, "transformers": 4, "torch": 4, "bytes": 9, "tensors": 8, "index": 8, "report": 6,
    "state": 4, "image": 5, "table": 3, "records": 2, "audit": 0.5, "onnx": 5,
}  # fmt: skip


class Watch:
    """A record of the files elsewhere, processes, sockets and pickles that the interpreter is asked
    for while it is on.
    """

    EVENTS = (
        *(
            "subprocess",
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "os.fork",
            "socket.",
            "pickle.find_class",
            "shutil.",
        ),
    )
    FREE = (
        *(sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])),
        *("/proc/", "/sys/", "/dev/null", "/dev/urandom"),
    )

    def __init__(self) -> None:
        self.folder, self.seen, self.on = os.getcwd(), collections.Counter[str](), False
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

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, and raise Hang after TOO_LONG or TOO_STILL."""
        self.on = True
        signal.setitimer(signal.ITIMER_PROF, TOO_LONG)
        signal.alarm(TOO_STILL)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            self.on = False


@contextlib.contextmanager
def hostile_files(folder: Path) -> Iterator[Case]:
    """Yield the case of a campaign: one hostile file in this folder, read by the program."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = {
            number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)
        }
        laboratory, watch = Laboratory(), Watch()

        def case(rng: random.Random) -> tuple[str, list[str]]:
            (kind,), broken = rng.choices(list(KINDS), list(KINDS.values())), list[str]()
            watch.seen.clear()
            try:
                with watch.watching():
                    code = getattr(laboratory, f"of_{kind}")(rng)
            except CertvitError as refusal:
                code = refusal.code
                broken += [f"{kind}: no line: {refusal.message!a:.200}"] * any(
                    c in refusal.message for c in "\n\x1b"
                )
            except Hang:
                code, broken = 1, [f"{kind}: a hang"]
            broken += [f"{kind}: {event}" for event in watch.seen]
            return f"{kind}: {f'refused {code}' if code else 'read'}", broken

        try:
            yield case
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        sys.exit(run_edits(__doc__, hostile_files(Path(name).resolve())))
