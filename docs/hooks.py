"""What the site has beside docs/: a page for each command, from the same generator as commands.md, and the root's pages."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from certcli.cli.main import COMMANDS
from certcli.cli.shared.reference import page

ROOT = Path(__file__).parent.parent
AT_THE_ROOT = ("ARCHITECTURE.md", "CHANGELOG.md")


def on_config(config: Any) -> Any:
    """Commands in the navigation: the list of all, then one page each; pages that no section names at the end."""
    pages: list[Any] = [{"All on one page": "commands.md"}, *({name: f"commands/{name}.md"} for name in COMMANDS)]
    for entry in config.nav:
        if "Commands" in entry:
            entry["Commands"] = pages
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    docs = Path(config.docs_dir)
    found = [page.relative_to(docs).as_posix() for page in sorted(docs.rglob("*.md"))]
    if more := [page for page in found if page not in named]:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, command in COMMANDS.items():
        files.append(File.generated(config, f"commands/{name}.md", content=page(name, command, "../")))
    for name in AT_THE_ROOT:
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to the root's pages lead to their copies; what is not of the site (code, the root's README) is named only."""
    up = "../" * page.file.src_uri.count("/")
    for name in AT_THE_ROOT:
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{name}")
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!commands|img|howto)([\w./-]+)\)", _named, markdown)


def _named(link: re.Match[str]) -> str:
    inside = (ROOT / "docs" / link.group(2)).exists() or link.group(2) in AT_THE_ROOT
    return link.group(0) if inside else link.group(1)
