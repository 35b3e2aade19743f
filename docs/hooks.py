"""What the site has beside docs/: a page for each command, from the same generator as commands.md, the root's pages, CI
files and tables in the pages that link to them, formulas as MathML, and mermaid's script where `make docs` found it."""

import csv
import os
import posixpath
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from certcli.cli.main import COMMANDS
from certcli.cli.shared.reference import section

sys.path.insert(0, str(Path(__file__).parent))
import formulas

ROOT = Path(__file__).parent.parent
AT_THE_ROOT = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
WITH_FORMULAS = {
    f"{page}.md"
    for page in (
        "bounds",
        "certify",
        "chains",
        "constrain",
        "limits",
        "local",
        "patch",
        "scaling",
    )
    + ("smoothing", "soundness")
}
"""Pages whose sentences hold formulas; a letter that stands alone is one there."""
TITLES: dict[str, str] = {}
NPM = Path(os.environ.get("NPM", "nowhere"))
"""Packages that `make docs` unpacked."""
MERMAID = NPM / "dist" / "mermaid.min.js"
"""Without it, the theme loads it from the internet when a page with a picture is opened."""
WORKER = NPM / "shim" / "index.js"
"""Lets pages from a disk search; without it, pages search where a server sends them."""
WORKER_ADDRESS = "https://unpkg.com/iframe-worker/shim"
"""From where the theme's plugin `offline` would load it."""


def on_config(config: Any) -> Any:
    """Commands in the navigation: the list of all, then one page each; pages that no section names at the end."""
    pages: list[Any] = [
        {"All on one page": "commands.md"},
        *({name: f"commands/{name}.md"} for name in COMMANDS),
    ]
    for entry in config.nav:
        if "All options" in entry:
            entry["All options"] = pages
    TITLES.update(_titles(config.nav), **{"commands.md": "all options"})
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    docs = Path(config.docs_dir)
    found = [page.relative_to(docs).as_posix() for page in sorted(docs.rglob("*.md"))]
    if more := [page for page in found if page not in named]:
        config.nav.append({"More": more})
    if MERMAID.is_file():
        config.extra_javascript.append("assets/mermaid.min.js")
    return config


def _titles(nav: list[Any]) -> dict[str, str]:
    """Return the title of each page of the navigation."""
    found: dict[str, str] = {}
    for title, entry in (pair for part in nav for pair in part.items()):
        found |= _titles(entry) if isinstance(entry, list) else {entry: title}
    return found


def on_files(files: Files, config: Any) -> Files:
    for name, command in COMMANDS.items():
        files.append(
            File.generated(
                config, f"commands/{name}.md", content="\n".join(section(name, command, "#"))
            )
        )
    for name in AT_THE_ROOT:
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        files.append(File.generated(config, name, content=text))
    if MERMAID.is_file():
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(MERMAID)))
    if WORKER.is_file():
        files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(WORKER)))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Fetch nothing: the script of the search from disk comes with the site, or is left out."""
    up = "../" * page.file.src_uri.count("/")
    local = f'<script src="{up}assets/iframe-worker.js"></script>' if WORKER.is_file() else ""
    return output.replace(f'<script src="{WORKER_ADDRESS}"></script>', local)


def on_post_template(output: str, **_: Any) -> str:
    """The same for 404.html, which a server sends: its search needs no script."""
    return output.replace(f'<script src="{WORKER_ADDRESS}"></script>', "")


def _first_page(index: str) -> str:
    """The repository's README as far as its links, then the list of all pages."""
    readme = (ROOT / "README.md").read_text().partition("## More")[0]
    return re.sub(r"\]\(docs/", "](", readme) + index.replace("# All pages", "## All pages", 1)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to the root's pages at their copies; only name files outside the site (code, the root's README)."""
    if page.file.src_uri == "README.md":
        markdown = _first_page(markdown)
    if page.file.src_uri in WITH_FORMULAS:
        markdown = formulas.inline(markdown)
    markdown = re.sub(
        r"^- \[(examples/ci/[\w.-]+)\]\(.*\)$",
        _shown,
        formulas.display(markdown),
        flags=re.MULTILINE,
    )
    markdown = re.sub(r"^\[([\w/-]+\.csv)\]\(.*\)$", _as_table, markdown, flags=re.MULTILINE)
    markdown = re.sub(
        r"\[[\w/-]+\.md\]\(([\w/.-]+\.md)", partial(_titled, page.file.src_uri), markdown
    )
    up = "../" * page.file.src_uri.count("/")
    for name in AT_THE_ROOT:
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{name}")
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!commands|img|howto)([\w./-]+)\)", _named, markdown)


def _titled(page: str, link: re.Match[str]) -> str:
    """A link whose words are a file's name, by the title of its page."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link.group(1)))
    return f"[{TITLES.get(target, link.group(1))}]({link.group(1)}"


def _shown(link: re.Match[str]) -> str:
    """A CI file in full: the site has no examples/ to link to."""
    kind = "bash" if link.group(1).endswith(".sh") else "yaml"
    return f"\n`{link.group(1)}`\n\n```{kind}\n{(ROOT / link.group(1)).read_text()}```\n"


def _as_table(link: re.Match[str]) -> str:
    """The cells of a table's file, below the link to it."""
    rows = list(csv.reader((ROOT / "docs" / link.group(1)).open(newline="")))
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join([link.group(0), "", *lines])


def _named(link: re.Match[str]) -> str:
    inside = (ROOT / "docs" / link.group(2)).exists() or link.group(2) in AT_THE_ROOT
    return link.group(0) if inside else link.group(1)
