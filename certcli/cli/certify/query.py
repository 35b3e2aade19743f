"""certvit certify NET.onnx --vnnlib SPEC: attack, then proof, then VNN-COMP's words for the
result."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from certcli.attack import run, stages
from certcli.attack.settings import AttackSettings
from certcli.audit.plan import EndsAfter, OutOfTime
from certcli.certify import methods, vnnlib
from certcli.certify.options import AUTO, BRANCH
from certcli.certify.query_network import QueryNetwork, query_network
from certcli.cli.certify.command import CertifyOptions
from certcli.cli.shared.output import Sink
from certcli.evaluation import perturbation, threat
from certcli.models import build, in_memory
from certcli.models.onnx import file, open
from certcli.system.errors import GateError, NoBoundError, UndecidedError, UsageError

HOLDS, VIOLATED, UNKNOWN = "holds", "violated", "unknown"
WORDS = {HOLDS: "unsat", VIOLATED: "sat", UNKNOWN: "unknown"}
"""VNN-COMP's: whether the unsafe set that the file asserts can be reached."""
SECONDS = 100.0
ATTACKS = 2
STEPS = 40

READ = frozenset(
    (
        *("ckpt", "vnnlib", "result", "seconds", "effort", "arithmetic", "seed", "device"),
        *("force", "as_json", "quiet"),
    )
)
"""Parameters of the command that a query takes."""

Example = tuple[list[float], list[float]]
"""Inputs and outputs of a counterexample, flattened."""


def require_read(context: typer.Context) -> None:
    """Raise UsageError for an option that is typed beside --vnnlib and that no query reads."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in READ:
            raise UsageError(
                f"{parameter.opts[-1]} does not go with --vnnlib, whose file says what is asked",
                "leave it out",
            )


@dataclass
class Decision:
    """What is known of a query so far.

    Attributes:
        remark: why it is unknown. doing: in what its seconds are over, if they are.
        arithmetic: of the proof. runtime: the name of the program that runs the file.
        result: VNN-COMP's text of a counterexample.
    """

    verdict: str = UNKNOWN
    remark: str = ""
    doing: str = "reading the files"
    arithmetic: str = ""
    runtime: str = ""
    result: str = ""


def answer_query(options: CertifyOptions, sink: Sink) -> None:
    """Decide a query; raise GateError where it is violated, UndecidedError where it is unknown."""
    from certcli.report.audit_page import save_text

    started = Sink.invocation.started or time.perf_counter()
    target, source = options.target, Path(options.source.ckpt)
    if source.suffix != ".onnx":
        raise UsageError("--vnnlib is a query about an ONNX file", "certvit certify NET.onnx")
    decision = Decision()
    end = started + (options.local.seconds or SECONDS)
    try:
        with EndsAfter(end - time.perf_counter()):
            _decide(decision, source, options, end)
    except OutOfTime:
        decision.remark = f"its seconds were over in {decision.doing}; a larger --seconds"
    spent = round(time.perf_counter() - started, 3)
    about = {"arithmetic": decision.arithmetic} if decision.arithmetic else {}
    facts = {"verdict": decision.verdict, "seconds": spent, "runtime": decision.runtime}
    sink.document({**facts, **about})
    sink.text(decision.verdict)
    if about:
        sink.note(
            f"proven for every input of the box, of the network that is read, "
            f"in {decision.arithmetic}"
        )
    if target.result is not None:
        save_text(target.result, f"{WORDS[decision.verdict]}\n{decision.result}")
    if decision.verdict == VIOLATED:
        raise GateError(f"{source} reaches an unsafe output; {decision.runtime} confirms it")
    if decision.verdict == UNKNOWN:
        raise UndecidedError(
            f"neither proof nor counterexample in {spent:.1f} s",
            decision.remark or "a larger --seconds",
        )


def _decide(decision: Decision, source: Path, options: CertifyOptions, end: float) -> None:
    """Attack, then prove of what ONNX Runtime runs as it is read, and tell `decision` at each step."""
    assert options.target.vnnlib is not None
    query = vnnlib.read_query(options.target.vnnlib)
    model, data = file.read_model(source)
    net, size = open.network_of_onnx(source, model)
    network = query_network(net, size, query)
    runtime = open.Runtime(source, data)
    decision.runtime = runtime.name
    if query.is_empty:
        decision.verdict = HOLDS
        return
    decision.doing = f"the attack of {ATTACKS} runs of {STEPS} steps"
    opened = in_memory.open_module(network, 0.0, 1.0, tuple(network.low.shape[-3:]))  # type: ignore[arg-type]
    example = _counterexample(opened, network, query, runtime, options.data.seed)
    if example is not None:
        decision.result = example_text(example, query, size)
        decision.verdict = VIOLATED
        return
    decision.doing = f"the comparison with {runtime.name}, after an attack without success"
    if not _runs_as_read(net, network, runtime, query):
        decision.remark = f"{runtime.name}, computes other outputs than the network that is read"
        return
    decision.doing = f"the proof by --effort {options.local.effort}, after an attack"
    remaining = end - time.perf_counter()
    decision.arithmetic, decision.remark = _proof_of_query(opened, options, remaining)
    decision.verdict = HOLDS if decision.arithmetic else UNKNOWN


def _runs_as_read(net: nn.Module, network: QueryNetwork, runtime: open.Runtime, query: Any) -> bool:
    """Tell whether the file, run at two inputs of the box, has the outputs of what is proven, up to
    rounding.
    """
    tensors = [each for each in net.state_dict().values() if each.is_floating_point()]
    kind = tensors[0].dtype if tensors else torch.float32
    grey = torch.full((1, *network.low.shape[-3:]), 0.5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for place in (grey, torch.rand(grey.shape, generator=generator, dtype=torch.float64)):
        inputs = nearest_in_box(network.inputs(place), query)
        with torch.inference_mode():
            ours = net(inputs.to(kind)).double().flatten()
        theirs = runtime.run(inputs).flatten()
        if ours.shape != theirs.shape:
            return False
        if not bool(((ours - theirs).abs() <= open.ROUNDING * ours.abs().amax()).all()):
            return False
    return True


def _counterexample(
    opened: build.OpenCheckpoint,
    network: QueryNetwork,
    query: vnnlib.Query,
    runtime: open.Runtime,
    seed: int,
) -> Example | None:
    """Attack the grey image within radius 1/2; what the file itself does at the point decides."""

    grey = torch.full((1, *network.low.shape[-3:]), 0.5, dtype=torch.float64)
    model = build.load(opened)
    point = grey
    if int(model(grey).argmax()) == 0:
        settings = AttackSettings(steps=STEPS, restarts=ATTACKS, seed=seed)
        (stage,) = stages.stages_of(("pgd",), None, "linf", (0.5,), settings)
        batch = (torch.tensor([0]), grey, torch.tensor([0]))
        (record,) = run.attack_images(
            model,
            [batch],
            stage.plan,
            perturbation.growing(stage.norm, stage.radii),
            settings,
            keep_images=True,
        )
        if record.adversarial is None or not record.fell:
            return None
        point = record.adversarial[None]
    inputs = nearest_in_box(network.inputs(point), query)
    outputs = runtime.run(inputs).flatten().tolist()
    values = inputs.double().flatten().tolist()
    return (values, outputs) if query.is_violated(values, outputs) else None


def nearest_in_box(inputs: Any, query: vnnlib.Query) -> Any:
    """Return the nearest float32 values in the box, where there are any."""

    stored = inputs.float()
    flat = stored.flatten()
    for place, (low, high) in enumerate(zip(query.low, query.high, strict=True)):
        if not low <= flat[place].item() <= high:
            toward = torch.tensor(float(high if flat[place].item() < low else low))
            flat[place] = torch.nextafter(flat[place], toward)
    return stored


def _proof_of_query(
    opened: build.OpenCheckpoint, options: CertifyOptions, seconds: float
) -> tuple[str, str]:
    """Return the arithmetic in which class 0 is proven within 1/2 of the grey image, or "" and why not.

    By --effort, or by branching; where that has no room or no rule, by the enclosures that fit.
    """
    asked = options.local.effort
    searching = (BRANCH, AUTO)
    remark = ""
    for effort in searching if asked in searching else (asked,):
        try:
            certifier, proven = _certified_query(opened, options, effort, seconds)
        except NoBoundError as failure:
            remark = remark or failure.message
            continue
        remark = remark or certifier.remark
        return (certifier.arithmetic if proven else ""), remark
    return "", remark


def _certified_query(
    opened: build.OpenCheckpoint, options: CertifyOptions, effort: Any, seconds: float
) -> tuple[Any, bool]:
    """Return the certifier of this effort, and whether it proves class 0."""
    local = replace(
        options.local,
        effort=effort,
        norm="linf",
        at=[0.5],
        seconds=seconds if effort == BRANCH else None,
        arithmetic=options.proof.arithmetic,
    )
    certifier: Any = methods.prepare_method(
        "local", opened, options.machine.pick_for(local.arithmetic), local
    )
    (certificate,) = certifier.batch([0], torch.full((1, *opened.record.input.size), 0.5), [0])
    return certifier, certificate.holds_at(threat.Threat("linf", 0.5))


def example_text(example: Example, query: vnnlib.Query, size: Sequence[int]) -> str:
    """Return VNN-COMP's counterexample: an S-expression, or of 2.0 a header and a number a line."""
    if query.version.startswith("1"):
        pairs = [
            f"({name}_{place} {value!r})"
            for name, values in zip("XY", example)
            for place, value in enumerate(values)
        ]
        return "(" + "\n ".join(pairs) + ")\n"
    shapes = (query.shape or (1, *size), (1, query.outputs))
    blocks = [
        f"{name} float32 {list(shape)}\n" + "\n".join(map(repr, values)) + "\n"
        for name, shape, values in zip("XY", shapes, example)
    ]
    return "".join(blocks)
