"""Sets the displayed formulas of the docs as MathML, which browsers draw without a script.

The pages write formulas as plain text, in indented blocks, so that they can be read in a terminal as well.
"""

import re
import unicodedata

from latex2mathml.converter import convert

_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ", "0123456789-T", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SIGNS = {
    "‖": r"\Vert ",
    "|": r"\vert ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "≤": r"\le ",
    "≠": r"\ne ",
    "·": r"\cdot ",
    "−": "-",
    "Σ": r"\sum ",
}
_COMMANDS = {name: name for name in ("alpha", "rho", "sigma", "mu", "max", "min", "sup", "log", "exp", "sum")} | {
    "inf": "infty"
}
_CODE = ("certvit ", "torch.", "`", "==", '"')


def display(markdown: str) -> str:
    """Replace each indented block that is a formula by its lines in MathML; fenced code stays."""
    parts = re.split(r"(^```.*?^```\s*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    blocks = re.compile(r"(?<=\n\n)(?: {4}\S[^\n]*\n)+(?=\n|\Z)")
    return "".join(part if part.startswith("```") else blocks.sub(_block, part) for part in parts)


def _block(found: re.Match[str]) -> str:
    text = found.group()
    if any(sign in text for sign in _CODE) or not re.search(r"[≤=√Σ]|<=|\^2", text):
        return text
    return "".join(f'<div class="formula">{convert(tex(line), display="block")}</div>\n' for line in text.splitlines())


def tex(line: str) -> str:
    """One line of plain text -> TeX."""
    text = unicodedata.normalize("NFD", line.strip()).replace("sqrt(", "√(")
    text = re.sub(r"(?<![A-Za-z_])([A-Za-z]{2,})(?=(.?))", _word, text)
    text = re.sub("(.)\u0304", r"\\bar{\1}", text)
    text = unicodedata.normalize("NFC", text)
    for signs, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        text = re.sub(f"[{''.join(signs)}]+", lambda run: f"{mark}{{{''.join(signs[c] for c in run.group())}}}", text)  # noqa: B023
    text = re.sub(r"([_^])([A-Za-z0-9]+(?:,[A-Za-z0-9]+)*)", r"\1{\2}", text)
    text = _roots(re.sub(r" {3,}", r" \\quad ", text))
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    return text


def _roots(text: str) -> str:
    while (start := text.find("√")) >= 0:
        end, depth = start + 2, 1
        if text[start + 1] != "(":
            text = f"{text[:start]}\\sqrt{{{text[start + 1]}}}{text[end:]}"
            continue
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = f"{text[:start]}\\sqrt{{{text[start + 2 : end - 1]}}}{text[end:]}"
    return text


def _word(found: re.Match[str]) -> str:
    word, after = found.groups()
    if word in _COMMANDS:
        return f"\\{_COMMANDS[word]} "
    if word.isupper():  # a product of matrices
        return " ".join(word)
    if word[0] == "d" and len(word) == 2:  # a differential
        return f"d {word[1]}"
    return f"\\operatorname{{{word}}}" if after and after in "(_[" else f"\\text{{ {word} }}"
