"""Sentences of the papers that claims and findings judge: short quotations, word for word, in
excerpts.txt.
"""

import re
from pathlib import Path

PATH = Path(__file__).with_name("excerpts.txt")
PAPERS = {"certvit": "CertViT", "specformer": "SpecFormer", "cauchy": "Cauchy paper"}


def plain(text: str) -> str:
    """White space as single blanks: papers break their lines elsewhere."""
    return re.sub(r"\s+", " ", text).strip()


def read(path: Path = PATH) -> dict[str, list[str]]:
    """Paper -> its quotations, in the order of the file."""
    quotations: dict[str, list[str]] = {name: [] for name in PAPERS}
    for line in path.read_text().splitlines():
        name, _, quotation = line.partition(": ")
        quotations[name].append(quotation)
    return quotations
