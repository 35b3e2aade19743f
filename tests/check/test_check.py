"""The second pair of eyes agrees with genuine proofs of each family, refutes forged ones, and
shares no code.
"""

import ast
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certcli.checkpoint.file import Checkpoint
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.numerics.real import INF, Real
from check.__main__ import main
from tests.check.conftest import FAMILIES
from tests.helpers.grids import crossed
from tests.verification.test_reports import follow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_it_agrees_with_every_leaf_of_a_genuine_proof(name: str, case: Any, run: Any) -> None:
    assert run(*case(name)) == (0, [])


def find(report: dict[str, Any], path: str, law: str = "theorem") -> dict[str, Any]:
    return next(row for row in report["proof"] if (row["path"], row["law"]) == (path, law))


def scaled(path: str, factor: float) -> Callable[[dict[str, Any]], None]:
    def forge(report: dict[str, Any]) -> None:
        row = find(report, path)
        row["value"] = [row["value"][0] * factor, row["value"][1]]

    return forge


def left_out(path: str) -> Callable[[dict[str, Any]], None]:
    """The node after a layer becomes the node before it."""

    def forge(report: dict[str, Any]) -> None:
        proof = report["proof"]
        node = proof.index(find(report, path, "composition"))
        leaf, before = proof[node]["parts"]
        gone = {node, leaf}
        place = {
            old: new
            for new, old in enumerate(number for number in range(len(proof)) if number not in gone)
        }
        place[node] = place[before]
        report["proof"] = [row for number, row in enumerate(proof) if number not in gone]
        for row in report["proof"]:
            row["parts"] = [place[part] for part in row["parts"]]

    return forge


def swapped(first: str, second: str) -> Callable[[dict[str, Any]], None]:
    def forge(report: dict[str, Any]) -> None:
        names = {first: second, second: first}
        for row in report["proof"]:
            row["path"] = names.get(row["path"], row["path"])

    return forge


def law(path: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda report: find(report, path, old).update(law=new)


def value(path: str, number: float) -> Callable[[dict[str, Any]], None]:
    return lambda report: find(report, path).update(value=Real(number).to_json())


def product_over_heads(report: dict[str, Any]) -> None:
    row = find(report, "mixings.0")
    row["value"] = (Real.from_json(row["value"]) * Real.from_json(row["value"]) * 0.5).to_json()


FORGERIES: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    **{
        f"{path} times .999": ("lip", scaled(path, 0.999))
        for path in ("embed", "layers.0", "head.hidden.1", "head.out")
    },
    "a norm 2^-20 too small": ("lip", scaled("layers.1", 1 - 2.0**-20)),
    "an activation below 1": ("lip", scaled("act", 0.999)),
    "a value map 2^-20 too small": ("timm", scaled("blocks.0.attn", 1 - 2.0**-20)),
    "GELU as published, 1.12": ("digits", value("blocks.0.mlp.act", 1.12)),
    "LayerNorm taken as 1": ("digits", value("blocks.0.norm1", 1.0)),
    "scores without the windows' mask": ("swin", scaled("layers.0.blocks.1.attn", 0.999)),
    "two layers in another order": ("lip", swapped("layers.0", "layers.1")),
    "a layer left out": ("lip", left_out("layers.1")),
    "a norm left out": ("digits", left_out("blocks.0.norm2")),
    "layer scale left out": ("layer scale", scaled("blocks.1.ls2", 0.5)),
    "a residual as a product": ("digits", law("blocks.0", "sum", "composition")),
    "a residual as side by side": ("digits", law("blocks.0", "sum", "concatenation")),
    "a residual as its larger part": ("digits", law("blocks.0", "sum", "same")),
    "a mean without its root": ("mix", scaled("", 0.5)),
    "product over groups": ("mix", product_over_heads),
    "parts side by side as the longest": ("mean", law("", "concatenation", "same")),
    "a member times .999": ("mean", scaled("members.1.head.hidden.0", 0.999)),
    "a member in the other's place": ("mean", swapped("members.0.layers.0", "members.1.layers.0")),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_it_refutes_a_forged_proof_whose_laws_hold(name: str, case: Any, run: Any) -> None:
    family, forge = FORGERIES[name]
    path, report = case(family)
    forged = copy.deepcopy(report)
    forge(forged)
    follow(forged)
    code, lines = run(path, forged)
    assert code == 1, lines
    assert any(line.startswith("refute") for line in lines)


def test_it_refutes_laws_that_do_not_hold_and_headlines_below_the_root(case: Any, run: Any) -> None:
    path, report = case("lip")
    about = {**report["function"], "arch": "certvit_sort_digits"}
    edits = {
        "upper": report["upper"] * 0.999,
        "upper_text": "1e-3",
        "log10_upper": -1.0,
        "checkpoint": "0",
    }
    assert run(path, {**report, "log10_upper": float("nan")})[0] == 1
    for key, other in {
        **edits,
        "arch": about["arch"],
        "input": [3, 8, 8],
        "function": about,
    }.items():
        assert run(path, {**report, key: other})[0] == 1, key
    for other in (-1.0, float("nan")):
        stated = copy.deepcopy(report)
        stated["proof"][0]["log10_upper"] = other
        assert any("node 0: log10_upper" in line for line in run(path, stated)[1])
    assert run(path, {**report, "schema": 2})[0] == 3
    mean, about_mean = case("mean")
    shorter = copy.deepcopy(about_mean)
    row = find(shorter, "", "concatenation")
    row["value"] = [
        row["value"][0] * 0.999,
        row["value"][1],
    ]  # of four parts near 1, side by side: near 2
    assert any("its law 'concatenation' gives more" in line for line in run(mean, shorter)[1])
    for edit in (
        lambda rows: rows[-1].update(value=[0.5, 0]),
        lambda rows: (
            rows.insert(0, dict(rows[0]))
            or [row.update(parts=[p + 1 for p in row["parts"]]) for row in rows]
        ),
        lambda rows: rows[-1].update(law="theorem", parts=[]),
        lambda rows: rows[-1].update(law="unbounded", parts=[]),
    ):
        forged = copy.deepcopy(report)
        edit(forged["proof"])
        assert run(path, forged)[0] == 1


def test_a_verdict_names_the_networks_own_node(
    case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = case("lip")
    nothing = {"value": ["inf", 0], "log10_upper": None, "path": "of the file"}
    rows = [{**row, **nothing} for row in report["proof"]]
    (tmp_path / "p.json").write_text(json.dumps({**report, **bound_document(INF), "proof": rows}))
    assert main([str(path), str(tmp_path / "p.json")]) == 0  # it states nothing
    assert "of the file" not in capsys.readouterr().out


def test_weights_that_were_edited_by_2_to_the_minus_10_refute_the_proof(
    case: Any, run: Any, tmp_path: Path
) -> None:
    path, report = case("lip")
    checkpoint = Checkpoint.read(path)
    heavier = {"head.hidden.0.weight": checkpoint.tensors["head.hidden.0.weight"] * (1 + 2.0**-10)}
    edited = Checkpoint({**checkpoint.tensors, **heavier}, checkpoint.record)
    edited.write(tmp_path / "edited.safetensors")
    code, lines = run(tmp_path / "edited.safetensors", report)
    assert (code, len(lines)) == (1, 3)  # the digest, the leaf, the root
    code, lines = run(tmp_path / "edited.safetensors", {**report, "checkpoint": edited.digest})
    assert code == 1
    assert any(line.startswith("refute") and "head.hidden.0" in line for line in lines)


def test_another_description_of_the_same_tensors_is_another_network(
    case: Any, run: Any, tmp_path: Path
) -> None:
    """A file without a record is described by the proof, whose digest covers the description."""
    from safetensors.torch import save_file

    path, report = case("digits")
    bare = tmp_path / "bare.safetensors"
    save_file(dict(Checkpoint.read(path).tensors), bare)
    assert run(bare, report) == (0, [])
    for change in ({"std": [10.0]}, {"arch_args": {"depth": 1, "num_heads": 64}}):
        assert run(bare, {**report, "function": report["function"] | change})[0] == 1


UNKNOWN: dict[str, dict[str, Any]] = {
    "an architecture": {"arch": "convnext_tiny"},
    "an argument": {"arch_args": {"depth": 1, "act_layer": "relu"}},
    "surgery": {"surgery": [{"path": "norm", "kind": "identity", "args": {}}]},
    "fewer tensors": {"arch": "certvit_lip_digits", "arch_args": {}},
    "no heads": {"arch_args": {"depth": 1, "num_heads": 7}},
    "eps 0": {"arch_args": {"depth": 1, "norm_eps": 0}},
    "std 0": {"std": [0.0]},
    "channels": {"std": [1.0, 1.0], "mean": [0.0, 0.0]},
    "image": {"size": [1, 9, 9]},
    "arguments that are a list": {"arch_args": ["depth"]},
    "statistics that are words": {"mean": ["half"]},
    "no image": {"size": [1, 0, 0]},
    "other classes": {"classes": 9},
    "resized images": {"resized": [4, 4]},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_it_says_what_it_cannot_check(name: str, case: Any, tmp_path: Path, run: Any) -> None:
    from safetensors.torch import save_file

    from check.documents import read_checkpoint

    path, report = case("digits")
    bare = tmp_path / "bare.safetensors"
    save_file(dict(Checkpoint.read(path).tensors), bare)
    function = report["function"] | UNKNOWN[name]
    report = {**report, "function": function, "arch": function["arch"], "input": function["size"]}
    report["checkpoint"] = read_checkpoint(bare, report)[2]
    code, lines = run(bare, report)
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].startswith("cannot check network")


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "{", '{"proof": [], "upper": 1}', '{"a": 1, "a": 2}', "[" * 10**5, "\x00",
    '{"schema": 1, "upper": 1.0, "proof": [{"path": "", "law": "theorem", "value": [0.5, 999999999999], "parts": []}]}',
    '{"schema": 1, "upper": 1.0, "proof": [{"path": "", "law": "theorem", "value": [NaN, 0], "parts": []}]}',
    '{"schema": 1, "upper": 1.0, "proof": [{"path": "", "law": "theorem", "value": [-0.5, 0], "parts": []}]}',
    '{"schema": 1, "upper": 1.0, "proof": [{"path": "", "law": "sum", "value": [0.5, 0], "parts": [0]}]}',
    *(f'{{"schema": 1, "upper": 1.0, "upper_text": "{head}", '
      '"proof": [{"path": "", "law": "sum", "value": [0.5, 0], "parts": []}]}'
      for head in ("1e999999999999", "1E-999999999999", "1/0")),
    '{"schema": 1, "upper": 1.0, "upper_text": "one", "proof": [{"path": "", "law": "sum", "value": [0.5, 0], "parts": []}]}',
])  # fmt: skip
def test_what_is_no_proof_is_unreadable(text: str, case: Any, run: Any) -> None:
    assert run(case("lip").path, text)[0] == 3


@pytest.mark.parametrize(("tensor", "edit"), crossed([
    ("lip", "layers.0.weight"), ("lip", "head.out.weight"), ("conv", "features.2.weight"), ("sort", "mixings.0.shift"),
    ("mix", "mixings.0.maps.1.weight"), ("digits", "blocks.0.attn.proj.weight"), ("layer scale", "blocks.0.ls1.gamma"),
    ("swin", "layers.0.blocks.1.attn.qkv.weight"), ("swin", "layers.1.downsample.reduction.weight"),
    ("mean", "members.1.head.hidden.0.weight"),
], ["nan", "inf", "short", "flat", "empty", "gone", "more"]))  # fmt: skip
def test_tensors_that_make_no_network_never_agree(
    tensor: tuple[str, str], edit: str, case: Any, run: Any, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    from check.documents import read_checkpoint

    family, name = tensor
    path, report = case(family)
    tensors = load_file(path)
    old = tensors.pop(name)
    new = {
        "nan": old * float("nan"), "inf": old + float("inf"), "short": old[1:], "flat": old.reshape(-1, 1, 1, 1, 1),
        "empty": old[:0], "more": old,
    }  # fmt: skip
    tensors |= {name: new[edit]} if edit in new else {}
    tensors |= {"more": old} if edit == "more" else {}
    save_file(
        {key: np.ascontiguousarray(value) for key, value in tensors.items()},
        tmp_path / "edited.safetensors",
    )
    report = {**report, "checkpoint": read_checkpoint(tmp_path / "edited.safetensors", report)[2]}
    with np.errstate(all="ignore"):
        code, lines = run(tmp_path / "edited.safetensors", report)
    assert code in (1, 2), (
        lines
    )  # without its layer scale the network is another one, whose proof this is not


def test_what_is_no_checkpoint_is_unreadable(case: Any, run: Any, tmp_path: Path) -> None:
    path, report = case("lip")
    whole = path.read_bytes()
    broken = tmp_path / "broken.safetensors"
    for data in (b"", b"x" * 100, whole[:1000], whole[:-4]):
        broken.write_bytes(data)
        assert run(broken, report)[0] == 3
    for nothing in (tmp_path / "none.safetensors", tmp_path):
        assert run(nothing, report)[0] == 3
    assert main([]) == 3
    assert main(["--help"]) == 0


def test_it_is_small_and_shares_no_code() -> None:
    files = sorted((ROOT / "check").glob("*.py"))
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1300
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    imported = {
        name.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import)
        for name in node.names
    }
    imported |= {
        (node.module or "").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)
    }
    assert imported - sys.stdlib_module_names == {"check", "numpy", "safetensors"}


def test_it_runs_where_torch_and_certcli_cannot_be_imported(case: Any, tmp_path: Path) -> None:
    path, report = case("lip")
    proof = tmp_path / "proof.json"
    proof.write_text(json.dumps(report))
    code = "import sys, runpy; sys.modules.update(torch=None, certcli=None, timm=None, msgspec=None, scipy=None)\n"
    code += "sys.argv = ['check', *sys.argv[1:]]; runpy.run_module('check', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, path, proof], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "11 agree, 0 refute, 0 cannot check"
