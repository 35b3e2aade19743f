"""Queries of VNN-LIB: what a file says exactly, and holds, violated or unknown about an ONNX file."""

import contextlib
import gzip
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from certcli.audit.plan import EndsAfter
from certcli.certify import vnnlib
from certcli.certify.query_network import query_network
from certcli.certify.vnnlib import read_query
from certcli.cli.certify import query
from certcli.models.onnx.call import READERS
from certcli.system.errors import DataError, GateError, UndecidedError
from tests.helpers.commands import attempt, document
from tests.helpers.onnx_graph import Node, graph_of

FIRST = """; of two inputs
(declare-const X_0 Real)
(declare-const X_1 Real)
(declare-const Y_0 Real)
(declare-const Y_1 Real)
(assert (<= X_0 0.1)) (assert (>= X_0 -0.3))
(assert (<= X_1 1e-1)) (assert (>= X_1 0.1))
"""
SECOND = """(vnnlib-version <2.0>)
(declare-network f (declare-input X float32 [1,2]) (declare-output Y float32 [1,2]))
(assert (and (<= X[0,0] 0.1) (>= X[0,0] -0.3) (<= X[0,1] 0.1) (>= X[0,1] 0.1)))
"""
UNSAFE = {
    "a row": ("(or (and (>= {1} {0})))", [({1: 1, 0: -1}, 0)]),
    "sums": ("(>= (+ {1} (* 0.5 {0}) 0.3) (- {0} 1))", [({1: 1, 0: Fraction(-1, 2)}, "1.3")]),
    "an edge": ("(<= {0} 0.7)", [({0: -1}, "0.7")]),
}


def written(folder: Path, text: str) -> Path:
    path = folder / "spec.vnnlib"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize(
    ("text", "names"), [(FIRST, ("Y_0", "Y_1")), (SECOND, ("Y[0,0]", "Y[0,1]"))]
)
def test_both_versions_say_the_same_in_exact_fractions(
    tmp_path: Path, text: str, names: tuple[str, str], name: str
) -> None:
    constraint, expected = UNSAFE[name]
    query = read_query(written(tmp_path, f"{text}(assert {constraint.format(*names)})"))
    assert query.low == [Fraction("-0.3"), Fraction("0.1")]
    assert query.high == [Fraction("0.1")] * 2
    ((row,),) = query.cases
    assert [(row.coefficients, row.constant)] == [
        (factors, Fraction(constant)) for factors, constant in expected
    ]


def test_the_box_of_the_network_covers_that_of_the_file(tmp_path: Path) -> None:
    """0.1 and -0.3 are no float64: the first edge lies below, and low + width above the last."""
    query = read_query(written(tmp_path, f"{FIRST}(assert (>= Y_1 (+ Y_0 0.1)))"))
    network = query_network(nn.Linear(2, 2), (2,), query)
    low, width = (
        [Fraction(one) for one in part.flatten().tolist()] for part in (network.low, network.width)
    )
    for place in range(2):
        assert low[place] <= query.low[place]
        assert (
            query.high[place] <= low[place] + width[place] < query.high[place] + Fraction(1, 2**50)
        )
    assert Fraction(network.last.bias[1].item()) >= Fraction("-0.1")


@pytest.mark.parametrize(
    "text",
    [
        FIRST,
        f"{FIRST}(assert (>= Y_1 Y_0)",
        f"{FIRST}(assert (>= Y_1 Y_0)))",
        f"{FIRST}(assert (>= Y_2 Y_0))",
        f"{FIRST}(assert (>= (* Y_1 Y_1) Y_0))",
        f"{FIRST}(assert (>= (/ Y_1 2) Y_0))",
        f"{FIRST}(assert (>= Y_1 X_0))",
        f"{FIRST}(assert (or (>= X_0 0) (<= X_0 -0.1)))(assert (>= Y_1 Y_0))",
        f"{FIRST}(assert (<= X_0 X_1))(assert (>= Y_1 Y_0))",
        f"{FIRST}(assert (not (>= Y_1 Y_0)))",
        f"{FIRST}(check-sat)",
        f"{FIRST}(assert (>= Y_1] Y_0))",
        f"{FIRST}(assert (>= Y_1 Y_0)) [",
        f"{FIRST}(assert (< X_0 0.05))(assert (>= Y_1 Y_0))",
        "(declare-network f ())",
        "(declare-network f ((declare-input X float32 [1,2])))",
        "(declare-network f (declare-input X float32 ([1,2])))",
        "(declare-network f (declare-input (X) float32 [1,2]))",
        f"{FIRST}(assert (>= Y_1 1e99999))",
        "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (<= X_0 1))(assert (>= Y_0 1))",
        f"{SECOND}(assert (>= Y[0,2] 1))",
        f"{SECOND}(assert (>= Y[1] 1))",
        SECOND.replace("[1,2])", "[9999999,9999999])", 1),
        "(" * 99 + ")" * 99,
        "",
        "()",
        "(assert)",
        "x",
    ],
)
def test_what_is_no_such_query_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError) as failure:
        read_query(written(tmp_path, text))
    assert "\n" not in str(failure.value)


def exported(folder: Path, *between: str) -> Path:
    """Write y = (x0 + x1, x0 - x1), which the box takes to [-0.2, 0.2] and [-0.4, 0], then `between`."""
    nodes: list[Node] = [("MatMul", ["x", "w"], ["0"])]
    nodes += [(op, [str(at)], [str(at + 1)]) for at, op in enumerate(between)]
    nodes.append(("Identity", [str(len(between))], ["y"]))
    weight = np.array([[1, 1], [1, -1]], np.float32)
    path = folder / "net.onnx"
    path.write_bytes(graph_of(nodes, sizes=("b", 2), w=weight))
    return path


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(f"{FIRST}(assert (>= Y_1 Y_0))".encode(), mtime=0)
    path = tmp_path / "q.vnnlib.gz"
    refused = 0
    for place in range(10, len(whole)):
        for data in (
            whole[:place],
            whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :],
        ):
            path.write_bytes(data)
            try:
                read_query(path)
            except DataError:
                refused += 1
    assert refused == 2 * (len(whole) - 10)


def test_many_constraints_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vnnlib, "MOST_CASES", 300)
    monkeypatch.setattr(vnnlib, "MOST_ROWS", 1000)
    many = "(>= Y_1 Y_0)" * 499
    for text in (f"(assert (and {many}))", f"(assert (and (or (>= Y_1 0) (>= Y_0 0)) {many}))"):
        assert all(len(case) >= 499 for case in read_query(written(tmp_path, FIRST + text)).cases)
    for text, named in ((f"(or {many})", "300 cases"), (f"(and {many * 3})", "1,000 constraints")):
        with pytest.raises(DataError, match=named):
            read_query(written(tmp_path, f"{FIRST}(assert {text})"))


def test_a_constraint_without_outputs_is_one(tmp_path: Path) -> None:
    query = read_query(written(tmp_path, f"{FIRST}(assert (or (>= Y_1 9) (>= 1 2)))"))
    rows = [row for case in query.cases for row in case]
    assert [(dict(row.coefficients), row.constant) for row in rows] == [({1: 1}, -9), ({}, -1)]
    network = query_network(nn.Linear(2, 2).eval(), (2,), query)
    assert network(torch.full((1, 1, 1, 2), 0.5).double())[0, 2] == -1


@pytest.mark.parametrize(
    ("unsafe", "verdict", "code"),
    [
        ("(>= {0} 0.21)", "holds", 0),
        ("(and (>= {0} 0.21) (<= {1} 0))", "holds", 0),
        ("(or (>= {0} 0.21) (<= {1} -0.1))", "violated", 7),
        ("(> {0} 0.2)", "unknown", 9),
        ("(and (>= {0} 0.19) (<= {1} -0.39))", "unknown", 9),
    ],
)
def test_a_query_holds_is_violated_or_unknown(
    tmp_path: Path, unsafe: str, verdict: str, code: int
) -> None:
    """The last two are true, and no row alone shows it."""
    net = exported(tmp_path)
    words = {"holds": "unsat", "violated": "sat", "unknown": "unknown"}
    for text, names in ((FIRST, ("Y_0", "Y_1")), (SECOND, ("Y[0,0]", "Y[0,1]"))):
        spec = written(tmp_path, f"{text}(assert {unsafe.format(*names)})")
        result = tmp_path / "result.txt"
        output: Any = document(
            "certify", net, "--vnnlib", spec, "--seconds", 600, "--result", result, "--force", code=code
        )  # fmt: skip
        assert output["verdict"] == verdict
        lines = result.read_text().splitlines()
        assert lines[0] == words[verdict]
        assert (len(lines) > 1) == (verdict == "violated")


def test_a_query_is_about_the_network_s_inputs_and_outputs(tmp_path: Path) -> None:
    query = read_query(written(tmp_path, f"{FIRST}(assert (>= Y_1 Y_0))"))
    for net, size in ((nn.Linear(3, 2), (3,)), (nn.Linear(2, 3), (2,))):
        with pytest.raises(DataError, match="the query is about"):
            query_network(net, size, query)


def test_a_network_without_a_proof_is_attacked_and_then_unknown(tmp_path: Path) -> None:
    """A staircase has no theorem: what says so is shown, and a counterexample counts all the same."""
    net = exported(tmp_path, "Ceil")
    for unsafe, error, why in (
        ("(>= Y_0 1.5)", UndecidedError, "ceil"),
        ("(>= Y_0 -0.5)", GateError, ""),
    ):
        spec = written(tmp_path, f"{FIRST}(assert {unsafe})")
        failure: Any = attempt("certify", net, "--vnnlib", spec, "--seconds", 600).exception
        assert isinstance(failure, error)
        assert why in failure.hint


def test_nothing_is_proven_of_a_file_that_runs_otherwise_than_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is wrong: -x read as x. Neither function reaches .41, and only one of them is looked at."""
    net = exported(tmp_path, "Neg", "Neg", "Neg")
    spec = written(tmp_path, f"{FIRST}(assert (>= Y_1 0.41))")
    assert document("certify", net, "--vnnlib", spec, "--seconds", 600)["verdict"] == "holds"
    monkeypatch.setitem(READERS, "Neg", lambda call: call.value())
    failure: Any = attempt("certify", net, "--vnnlib", spec, "--seconds", 600).exception
    assert isinstance(failure, UndecidedError)
    assert "other outputs than the network that is read" in failure.hint


def test_a_query_ends_with_its_seconds_and_says_in_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: Any) -> Any:
        with contextlib.suppress(Exception), EndsAfter(0.01):
            while True:
                pass

    monkeypatch.setattr(query, "_proof_of_query", endless)
    spec = written(tmp_path, f"{FIRST}(assert (>= Y_1 0.41))")
    net = exported(tmp_path)
    failure: Any = attempt("certify", net, "--vnnlib", spec, "--seconds", 600).exception
    assert isinstance(failure, UndecidedError)
    assert "over in the proof by --effort" in failure.hint
