"""The rooms on whose code a certificate rests, and the tests that hold their laws."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Room:
    """sources: below certcli/, files or folders. tests: below tests/."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def files(self) -> list[Path]:
        places = [ROOT / "certcli" / source for source in self.sources]
        return sorted(
            {
                file
                for place in places
                for file in ([place] if place.is_file() else place.rglob("*.py"))
            }
        )


_LIPSCHITZ = ("bound", "chain", "context", "network", "value")
_LAWS = ("lipschitz", "nn/test_attention.py", "soundness/test_roundings.py")
_NUMERICS = ("arithmetic", "convolution", "eigenvalues", "outward", "real", "spectral")
_EVALUATION = (
    "evidence",
    "evidence_schema",
    "image_records",
    "intervals",
    "perturbation",
    "record_lines",
    "records",
    "threat",
)
ROOMS = {
    "numerics": Room(tuple(f"lipschitz/numerics/{name}.py" for name in _NUMERICS), _LAWS),
    "rules": Room(("lipschitz/rules", *(f"lipschitz/{name}.py" for name in _LIPSCHITZ)), _LAWS),
    "enclosure": Room(("enclosure",), ("enclosure", "soundness/test_local_programs.py")),
    "rounding": Room(("rounding",), ("rounding", "certify/test_as_run.py")),
    "certify": Room(
        ("certify",), ("certify", "api/test_signatures.py", "enclosure/test_branching.py")
    ),
    "judge": Room(
        ("attack/judge.py",),
        ("attack/test_judge.py", "attack/test_run.py", "cli/test_attack_certified.py"),
    ),
    "evaluation": Room(
        tuple(f"evaluation/{name}.py" for name in _EVALUATION),
        ("evaluation", "attack/test_judge.py", "soundness/test_fuzz.py"),
    ),
    "verification": Room(("verification",), ("verification", "nn/test_networks.py")),
    "checkpoint": Room(("checkpoint",), ("checkpoint",)),
    "engine": Room(
        ("engine",),
        (
            "engine",
            *(
                f"lipschitz/test_{name}.py"
                for name in ("network", "refusals", "attention", "rules")
            ),
        ),
    ),
}
