"""What is documented exists, and what exists is documented."""

import re
from pathlib import Path

import pytest

from certcli import errors
from certcli.attack.catalogue import ATTACKS
from certcli.cli.main import COMMANDS
from certcli.cli.reference import reference
from certcli.constrain.methods import METHODS
from certcli.finetune.losses import LOSSES
from certcli.nn.surgery import REPLACEMENTS
from certcli.registry import Registry

ROOT = Path(__file__).parent.parent
REGISTRIES = [ATTACKS, METHODS, LOSSES, REPLACEMENTS]


def test_the_reference_page_is_the_commands() -> None:
    written = (ROOT / "docs" / "commands.md").read_text()
    assert written == reference(COMMANDS), "run: python -m certcli.cli.reference > docs/commands.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"certvit {name}" in (ROOT / "README.md").read_text()


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    codes = {
        kind.code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CertvitError)
    }
    assert {str(code) for code in codes} <= set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_every_registered_name_loads_and_says_what_it_is(registry: Registry) -> None:
    for entry in registry:
        assert entry.load() is not None
        assert entry.summary
    with pytest.raises(errors.UsageError, match="nobody"):
        registry.load("nobody")


def test_no_path_of_a_machine_in_the_repository() -> None:
    suffixes = {".py", ".md", ".toml", ".sh", ""}
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if (
            path.is_file()
            and path.suffix in suffixes
            and not any(part.startswith((".", "demo-output")) for part in parts)
        ):
            if path.name in ("LICENSE", "test_docs.py"):
                continue
            text = path.read_text(errors="ignore")
            assert not re.search(r"/(home|root|work|Users)/", text), path
