"""certvit doctor: whether the packages on this machine fit together, and what the machine has."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from certcli.attack.catalogue import INSTALL, PREFIX
from certcli.cli.shared import groups, output
from certcli.cli.shared.command import command
from certcli.system import errors, interpreter


@dataclass(frozen=True)
class Finding:
    """A row of the report. broken: something fails because of it; remark: why, what to type."""

    part: str
    state: str
    remark: str = ""
    broken: bool = False


@command("certvit doctor", "certvit doctor --json", page="exit-codes.md")
def doctor(talk: groups.Talk = groups.Talk()) -> None:
    """Check that the installed packages fit together, and describe this machine; exit 7 if
    something is broken."""
    sink = talk.sink()
    gate = output.Gate()
    findings = [
        Finding("certvit", _installed_version("certvit")),
        Finding("Python", platform.python_version()),
        Finding("torch", _installed_version("torch")),
        _torchvision_finding(),
        Finding("timm", _installed_version("timm")),
        *_torchattacks(),
        *_machine(),
    ]
    for finding in findings:
        gate.demand(
            not finding.broken,
            errors.GateError(f"{finding.part} {finding.state}: broken", finding.remark),
        )
    sink.document(
        {
            "parts": [
                {"part": one.part, "found": one.state, "remark": one.remark, "broken": one.broken}
                for one in findings
            ]
        },
        gate,
    )
    sink.table(
        "This installation",
        ("part", "found"),
        [(finding.part, finding.state) for finding in findings],
    )
    for finding in findings:
        if finding.remark and not finding.broken:
            sink.text(f"{finding.part}: {finding.remark}")
    gate.enforce()


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _torchvision_finding() -> Finding:
    """Import timm as a program without certvit does: in a process of its own."""
    installed = _installed_version("torchvision")
    done = interpreter.run_isolated("import timm")
    if done.returncode == 0:
        return Finding("torchvision", installed)
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    remark = f"`import timm` fails outside certvit ({reason[:120]})"
    if "torchvision::" in reason:
        public = installed.partition("+")[0]
        remark += (
            "; certvit itself works. This torchvision was built for another torch; take "
            "both from one index: "
            f"pip install --force-reinstall --no-deps torchvision=={public} "
            "--index-url https://download.pytorch.org/whl/cpu"
        )
    return Finding("torchvision", installed, remark, broken=True)


def _torchattacks() -> list[Finding]:
    version_here = _installed_version("torchattacks")
    requests = _installed_version("requests")
    if version_here == "missing":
        remark = f"attacks named {PREFIX}NAME are refused, all others work: {INSTALL}"
        return [Finding("torchattacks", version_here, remark)]
    if not requests.startswith("2.25"):
        return [Finding("torchattacks", version_here)]
    remark = (
        "torchattacks asks for 2.25 and never imports it; this one and its urllib3 and "
        "idna have known "
        "vulnerabilities: pip install --upgrade requests urllib3 idna breaks nothing"
    )
    return [Finding("torchattacks", version_here), Finding("requests", requests, remark)]


def _machine() -> list[Finding]:
    import torch

    from certcli.system.memory import free_bytes

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return [
        Finding("GPU", ", ".join(names) or "none"),
        Finding(
            "cores",
            str(
                len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            ),
        ),
        Finding("free memory", f"{free_bytes() / 1e9:.1f} GB"),
    ]
