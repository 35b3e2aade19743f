"""What a command refuses, in one line and before any costly work: a row names the words, the exit
code, and a part of cause or hint; what was mistyped is suggested, and no option is taken and left
unused.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from certcli.checkpoint.file import Checkpoint
from certcli.cli.main import COMMANDS
from certcli.finetune import settings
from certcli.finetune.losses import LOSSES
from certcli.images import datasets
from certcli.models import build, hub, open
from certcli.models import open as opening
from certcli.system import errors
from tests.helpers.commands import attempt, console

ROWS = """
lipschitz m --frobnicate | 2 | --frobnicate
certfy | 2 | 'certify'
certify | 2 | CKPT
lipschitz m --max large | 2 | --max
lipschitz m --max nan | 2 | --max
lipschitz m --max -1 | 2 | --max
constrain m --beta nan | 2 | --beta nan
certify m --vnnlib q.vnnlib | 2 | an ONNX file
certify m --result r.txt | 2 | answer to a query
certify n.onnx --vnnlib q.vnnlib -e 0.1 | 2 | -e does not go with --vnnlib
certify n.onnx --vnnlib q.vnnlib --method smoothing | 2 | --method does not go with --vnnlib
certify n.onnx --vnnlib q.vnnlib --records r.jsonl | 2 | --records does not go with --vnnlib
constrain n.onnx | 2 | n.onnx is a program
finetune n.onnx --loss ce | 2 | n.onnx is a program
adapt n.onnx | 2 | n.onnx is a program
adapt m -o . | 2 | -o . names no file
lipschitz n.onnx -o x.safetensors | 2 | n.onnx is a program
attack n.onnx -o x.safetensors | 2 | n.onnx is a program
certify m -e nan | 2 | nan
certify m -e inf | 2 | inf
certify m -e -1 | 2 | -1
certify m --min-certified nan | 2 | nan
certify m --min-certified 90 | 2 | 90
certify m --min-certified 0.5@nan | 2 | nan
certify m --min-certified 0.5@inf | 2 | inf
certify m --min-certified half | 2 | half
certify m --method nobody | 2 | nobody
certify m --patch 2 | 2 | --patch is for
certify m --method patch | 2 | needs a patch
certify m --method patch --patch 9 | 2 | do not fit
certify m --method patch --patch soup | 2 | is no patch
certify m --method patch --patch 8 | 2 | hide the whole image
certify m --method patch --patch 2 --procedure double-masking:1 | 2 | --procedure double-masking:1
certify m --method patch --patch 2 -e 0.5 | 2 | --epsilon does not go
certify m --method patch --patch 2 --method lipschitz | 2 | stands alone
certify m --method patch --patch 2 --procedure prayer | 2 | unknown procedure
certify m --method patch --patch 2 --procedure voting:9 | 2 | bands of 9 columns
certify m --method patch --patch 2 --procedure voting:0 | 2 | unknown procedure 'voting:0'
certify m --method patch --patch 2 --procedure double-masking:many | 2 | unknown procedure 'double-masking:many'
certify m --method patch --patch 2 --min-certified 0.5@3 | 2 | names a patch that is not certified
certify m --method lipschitz --denoiser m | 2 | works with --method smoothing
certify m --method smoothing --sigma 0 | 2 | sigma
certify m --method smoothing --sigma -0.1 | 2 | sigma
certify m --method smoothing --sigma nan | 2 | sigma
certify m --method smoothing --sigma wide | 2 | sigma
certify m --method smoothing --sigma 0.25,0.5 | 2 | radii of several would share --alpha
certify m --method smoothing --alpha 0 | 2 | alpha
certify m --method smoothing --alpha 1 | 2 | alpha
certify m --method smoothing --alpha nan | 2 | alpha
certify m --method smoothing --samples 0 | 2 | samples
certify m --method smoothing --samples 9 | 2 | --samples 10 or more
certify m --method smoothing --samples 100 -e 9 | 2 | no radius beyond 0.375
certify m --method smoothing --enough nan | 2 | enough
certify m --method smoothing --enough 5 | 2 | enough
certify m --method smoothing --precision int3 | 2 | int3
certify m --method smoothing --seed -1 | 2 | seed
certify m --method smoothing --method auto | 2 | auto alone
certify m --method smoothing --norm linf | 2 | --method local only
certify m --method smoothing --method local --norm linf | 2 | --method local only
certify m --method smoothing --method smoothing | 2 | once
certify m --method smoothing --method lipschitz --records r.jsonl | 2 | holds one method
certify m --sigma 0.25 --sigma 0.5 | 2 | --sigma is given 2 times
audit m --sigma 0.25 --sigma 0.5 | 2 | --sigma is given 2 times
verify m m --records x.jsonl | 2 | --records
verify m m --plot x.png | 2 | --plot
verify m m -o x.safetensors | 2 | -o
verify m m --min-certified 0.5 | 2 | --min-certified
constrain m --keep 0 | 2 | --keep must lie between
constrain m --keep 1.5 | 2 | --keep must lie between
certify m --method smoothing --effort branch | 2 | works with --method local
certify m --method local --radius wide | 2 | unknown radius
certify m --method local --sigma 0.2 | 2 | works with --method smoothing
certify m --method box --method bcp --samples 7 | 2 | works with --method smoothing
attack m -e 1/0 | 2 | 1/0
attack m -e -0.1 | 2 | -0.1
attack m -e nan | 2 | nan
attack m --min-robust nan | 2 | nan
attack m --min-robust 90 | 2 | 90
attack m --min-robust -0.5 | 2 | -0.5
attack m --preset nobody | 2 | nobody
attack m --preset certvit -a pgd | 2 | certvit
attack m --preset certvit --norm l2 | 2 | certvit
attack m --preset certvit --steps 3 | 2 | certvit
attack m --preset cauchy -e 1.0 | 2 | cauchy
attack m -a pgd -a pgd | 2 | twice
attack m --norm l1 | 2 | l1
attack m --steps 0 | 2 | --steps
attack m -a cw --norm linf | 2 | cw
attack m --resume | 2 | --records
attack m --resume --records r.jsonl --save-examples x.safetensors | 2 | --resume
attack m -a pdg | 2 | did you mean 'pgd'
predict m i --defence prayer | 2 | prayer
predict m i --prove | 2 | --defence patch
predict m i --patch 2 | 2 | --defence patch
predict m i --defence patch | 2 | needs a patch
predict m i --defence patch --patch 99 | 2 | do not fit
predict m nowhere.png | 6 | nowhere.png
lipschitz certvit/digitsx | 3 | did you mean 'certvit/digits'
adapt m --goal win | 2 | unknown --goal 'win'
verify certvit/mnst | 3 | did you mean 'certvit/mnist'
log n.onnx | 3 | ONNX file
init vit_tiny_patch16_224 --arch-arg img_size=8 | 4 | does not take an image of size 3x8x8
init certvit_vit_cifar10 --mean 0.5,0.5 | 2 | 3 input channels
lipschitz m --dataset digits --around 0 | 2 | above 0
lipschitz m --dataset digits --around -0.1 | 2 | above 0
lipschitz m --dataset digits --around inf | 2 | above 0
lipschitz m --dataset digits --around nan | 2 | above 0
lipschitz m --dataset digits --around 8 | 2 | no two images are farther apart
lipschitz m --dataset digits --around 1 --norm linf | 2 | no two images are farther apart
lipschitz m --dataset digits --norm linf | 2 | --around
lipschitz m --dataset digits --around 0.1 --norm l7 | 2 | l7
finetune m --batch-size 99999999999999999999 | 2 | --batch-size
finetune m -e nan | 2 | nan
finetune m --schedule cosin | 2 | cosin
finetune m --enclosure-penalty 0.3,0 | 2 | neither one number nor three
"""
TABLE = [tuple(part.strip() for part in row.split(" | ")) for row in ROWS.strip().splitlines()]


@pytest.mark.parametrize(("words", "code", "named"), TABLE, ids=[words for words, *_ in TABLE])
def test_what_is_refused_is_one_line_and_with_json_one_document(
    words: str,
    code: str,
    named: str,
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"m": workshop / "plain.safetensors", "i": tmp_path / "i.png"}
    Image.new("L", (8, 8)).save(files["i"])
    Path("n.onnx").touch()
    typed = [files.get(word, word) for word in words.split()]
    ended, out, err = console(*typed)
    assert ended == int(code)
    # of a network that was read already
    assert [line for line in out.splitlines() if not line.startswith("network: ")] == []
    assert err.count("certvit:") == 1
    assert named in err.partition("certvit:")[2]
    ended, out, _ = console(*typed, "--json")
    (line,) = out.splitlines()
    error = json.loads(line)
    assert (ended, error["code"]) == (int(code), int(code))
    assert named in error["error"] + error["hint"]
    assert error["hint"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i.png", "n.onnx"]


def test_what_was_probably_meant(plain: Checkpoint, workshop: Path) -> None:
    spec = plain.record.input
    asked = {
        "'digits'": lambda: datasets.load_dataset("digit", spec),
        "'torch/mnist'": lambda: datasets.load_dataset("torch/mnits", spec, data_dir=workshop),
        "'vit_tiny_patch16_224'": lambda: build.create(
            "vit_tiny_patch16_244", {}, initialise=False
        ),
        "'deit_tiny_patch16_224'": lambda: open.open_checkpoint("deit_tiny_patch16_24"),
    }
    for meant, ask in asked.items():
        with pytest.raises(errors.CertvitError) as refused:
            ask()
        assert "did you mean '" in refused.value.hint
        assert meant in refused.value.hint.split("?")[0] + "?"


@pytest.mark.parametrize("source", ["hf-hub:nobody/nothing", "vit_base_patch8_224.dino"])
def test_no_network_is_one_line_at_once(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        constants, "ENDPOINT", "https://hub.invalid"
    )  # a name that no network has (RFC 2606)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not hub.reachable()
    monkeypatch.setattr(
        time,
        "sleep",
        lambda seconds: pytest.fail("the library's own retries wait, for a minute in all"),
    )
    with pytest.raises(errors.CheckpointError, match=r"no network: hub.invalid cannot be reached"):
        open.open_checkpoint(source)
    assert constants.HF_HUB_OFFLINE is False


OTHERS: dict[str, Any] = {
    "attack_norm": "l2",
    "attack_steps": 3,
    "ard_prm": 0.3,
    "attack_ramp": 0.5,
    "attack_epsilon": 0.1,
    "stiefel_lr": 0.2,
    "weight_decay": 0.2,
    "ramp": 0.7,
    "worst_weight": 0.2,
    "enclosed": 4,
}


@pytest.mark.parametrize(
    "name",
    sorted(
        {name for group in settings.SWITCHES.values() for name in group} - {*settings.FILLED_IN}
    ),
)
def test_an_option_of_a_switch_that_is_off_is_refused(name: str) -> None:
    assert OTHERS[name] != settings.FinetuneSettings.__dataclass_fields__[name].default
    with pytest.raises(errors.UsageError, match=f"--{name.replace('_', '-')}"):
        settings.FinetuneSettings(loss="ce", optimiser="adamw", **{name: OTHERS[name]})


@pytest.mark.parametrize("name", settings.OF_A_CHOICE)
def test_an_option_of_another_choice_is_refused(name: str) -> None:
    option, values = settings.OF_A_CHOICE[name]
    others: dict[str, Any] = {"loss": "margin", "optimiser": "stiefel", "adversarial": "pgd"}
    wrong = dict.fromkeys(("ramp", "worst_weight", "enclosed"), "ce")
    wrong |= {"attack_steps": "fgsm", "stiefel_lr": "adamw"}
    others |= {option: wrong.get(name, "stiefel")}
    assert others[option] not in values
    with pytest.raises(errors.UsageError, match=f"--{name.replace('_', '-')} has no meaning with"):
        settings.FinetuneSettings(**others, **{name: OTHERS[name]})
    settings.FinetuneSettings(**{**others, option: values[0]}, **{name: OTHERS[name]})


@pytest.mark.parametrize("loss", [loss.name for loss in LOSSES if loss.needs != "nothing"])
def test_a_loss_with_a_radius_has_its_ramp(loss: str) -> None:
    assert loss in settings.OF_A_CHOICE["ramp"][1]


JUDGING = ("audit", "certify", "attack", "finetune", "adapt", "constrain", "lipschitz")
READING = (*JUDGING, "verify", "predict", "merge", "log")
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "dataset": (JUDGING, ("--dataset", "nosuch"), 6),
    "output": (
        ("audit", "certify", "attack", "finetune", "adapt", "constrain"),
        ("-o", "no/where/x.safetensors"),
        8,
    ),
    "an output that is there": (
        ("audit", "certify", "attack", "finetune", "adapt", "constrain"),
        ("-o", "network.safetensors"),
        2,
    ),
    "method": (("audit", "certify"), ("--method", "nosuch"), 2),
    "attack": (("audit", "attack"), ("-a", "nosuch"), 2),
    "loss": (("finetune",), ("--loss", "nosuch"), 2),
    "radius": (("audit", "certify", "attack", "finetune"), ("-e", "-1"), 2),
    "time": (("audit", "finetune"), ("--time-budget", "soon"), 2),
    "gate": (("audit",), ("--fail-on", "clean>2"), 2),
    "report": (("audit",), ("--report", "x.doc"), 2),
}
"""What is wrong, the commands that take it, the words, and the exit code."""
CASES = [
    (name, command, words, code)
    for name, (commands, words, code) in MISTAKES.items()
    for command in commands
]


@pytest.mark.parametrize(
    ("name", "command", "words", "code"), CASES, ids=lambda part: str(part)[:20]
)
def test_a_mistake_is_refused_before_a_network_is_opened(
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    command: str,
    words: tuple[str, ...],
    code: int,
) -> None:
    network = tmp_path / "network.safetensors"
    network.write_bytes((workshop / "plain.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)

    def expensive(*given: object, **more: object) -> None:
        pytest.fail(f"{command} opened the network before it refused the {name}")

    monkeypatch.setattr(opening, "open_checkpoint", expensive)
    monkeypatch.setattr(build, "load", expensive)
    done = attempt(command, "network.safetensors", *words)
    assert getattr(done.exception, "code", done.exit_code) == code, (done.output, done.exception)


@pytest.mark.parametrize("command", READING)
def test_a_mistyped_file_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "open_checkpoint", lambda *given: pytest.fail("opened"))
    more = ("x.png",) if command in ("predict", "merge") else ()
    done = attempt(command, "modle.safetensors", *more)
    assert isinstance(done.exception, errors.CertvitError)
    assert done.exception.code == 3
    assert "modle.safetensors" in done.exception.message


def test_the_law_covers_every_command_that_reads_a_network() -> None:
    others = {"init", "doctor"}
    assert set(COMMANDS) - others == set(READING)


@pytest.mark.parametrize(
    "words",
    [("audit", "modle.safetensors"), ("certify", "model.safetensors", "--dataset", "nosuch")],
)
def test_a_mistyped_file_or_dataset_imports_no_torch_and_no_other_command(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    root = Path(__file__).parents[2]
    program = (
        "import sys\nfrom certcli.cli.main import run\nsys.argv = ['certvit', *sys.argv[1:]]\n"
        "try:\n    run()\nexcept SystemExit as stop:\n    code = stop.code\n"
        "others = [name for name in sys.modules if name.startswith('certcli.cli.')]\n"
        "others = [name for name in others if name.endswith('.command') and '.shared.' not in name]\n"
        "print(code, 'torch' in sys.modules, *others)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    code = "3" if words[0] == "audit" else "6"
    assert done.stdout.split() == [code, "False", f"certcli.cli.{words[0]}.command"], done.stderr
