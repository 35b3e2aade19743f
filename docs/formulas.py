"""Set the formulas of the docs as MathML, which browsers draw without a script.

The pages write formulas as plain text, so that they can be read in a terminal as well. An indented block is a displayed
formula if it holds a relation, a root or a sum. In a sentence, a formula is the longest run of words of `_ATOM` with
balanced brackets and a sign of `_SIGN`, or a single letter; code, headings and links have none.
"""

import re
import unicodedata
from collections.abc import Iterator

_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ", "0123456789-T", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SIGNS = {
    "‖": r"\Vert ",
    "|": r"\vert ",
    "∣": r"\vert ",
    "->": r"\to ",
    "→": r"\to ",
    "+-": r"\pm ",
    "-+": r"\mp ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "<": r"\lt ",
    ">": r"\gt ",
    "∝": r"\propto ",
    "∘": r"\circ ",
    "∈": r"\in ",
    "∞": r"\infty ",
    "×": r"\times ",
    "·": r"\cdot ",
    " . ": r"\cdot ",
    "−": "-",
    "Σ": r"\sum ",
}
_GREEK = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "eta",
    "lambda",
    "mu",
    "nu",
    "rho",
    "sigma",
    "tau",
    "Phi",
)
_COMMANDS = {name: name for name in (*_GREEK, "max", "min", "sup", "log", "exp", "sum", "det")} | {
    "inf": "infty"
}
_NAMES = ("diag", "softmax", "Lip", "Cov", "var", "sqrt", "fl", "tr", "ceil", "floor")
_CODE = ("certvit ", "torch.", "`", "==", '"')

_LETTER = r"(?:[A-Za-zΑ-Ωα-ωāēīōūȳ]\u0304?'*|[A-Z]0)(?![A-Za-z0-9'\u0304])"
_NAMED = f"(?:{'|'.join((*_COMMANDS, *_NAMES))})"
_ATOM = re.compile(
    rf"{_NAMED}'*(?![A-Za-z])|[A-Za-z]\w*(?=\()|(?<=[‖|∣])[A-Za-z]+(?=[‖|∣])|(?<=\()[A-Za-z]{{2}}(?=\))"
    rf"|d[a-np-z](?![A-Za-z0-9'])|{_LETTER}|[A-Z]'?[A-Z]'?(?![A-Za-z])|\d+(?:[.,]\d+)*(?:\.\.\.)?(?!e[+-])|\.\.\."
    r"|[_^](?:\{[^{}]*\}|\([^()]*\)|-?[A-Za-z0-9α-ω∞]+(?:,[A-Za-z0-9]+)*)|[₀-₉]+|[⁰¹²³⁴-⁹⁻ᵀ]+"
    r"|->|\+-|-\+|<=|>=|[()\[\]{}‖|∣√Σ≤≥≠=·∞→∝∘∈×⌈⌉⌊⌋+−\-/,]"
)
_RELATIONS = ("<", ">", ".")
"""Signs that count where they stand between spaces."""
_SIGN = re.compile(
    r"[‖|∣√Σ≤≥≠=·∞→∝∘∈⁰¹²³⁴-⁹⁻ᵀ₀-₉−+]| [<>] |[\w\])][_^]|\b(?:[A-Za-zα-ω]|"
    + _NAMED
    + r")\(|^\w/\w$|^\[.*, .*\]$"
)
_LINE = 24
"""Signs of a formula that never breaks: on a telephone, two of them fill a line."""
_CELL = "\x1f"
_SYMBOL = rf"{_LETTER}|d[a-np-z]|(?:[b-zB-HJ-Z]'? )+[b-zB-HJ-Z]"
_RELATION = r"(?:<=|>=|->|\+-|-\+|[=<>≤≥≠·→∝∘∈×])"
_SKIPPED = re.compile(
    r"^```(?:.|\n)*?^```\s*?$|^(?: {4}|#).*$|`[^`]*`|\]\([^)]*\)|</?[a-z][^<>]*>|\*+|^[-*] |\x1f|\n\n",
    re.MULTILINE,
)


def display(markdown: str) -> str:
    """Replace each indented block that is a formula by its lines in MathML; fenced code stays."""
    parts = re.split(r"(^```.*?^```\s*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    blocks = re.compile(r"(?<=\n\n)(?: {4}\S[^\n]*\n)+(?=\n|\Z)")
    return "".join(part if part.startswith("```") else blocks.sub(_block, part) for part in parts)


def _block(found: re.Match[str]) -> str:
    text = found.group()
    if any(sign in text for sign in _CODE) or not re.search(r"[≤=√Σ]|<=|\^2", text):
        return text
    return "".join(
        f'<div class="formula">{_mathml(line, "block")}</div>\n' for line in text.splitlines()
    )


def inline(markdown: str) -> str:
    """Replace each formula of a sentence, or of a cell of a table, by MathML."""
    text = re.sub(r"^\|.*\|$", _cells, markdown, flags=re.MULTILINE)
    made, end = [], 0
    for skipped in (*_SKIPPED.finditer(text), None):
        start = last = end
        prose = text[start : skipped.start() if skipped else len(text)]
        for first, after in find(prose):
            formula, mark = (
                " ".join(prose[first:after].split()),
                re.match(r"[,.;:)]*", prose[after:]),
            )
            lines = " ".join(
                f'<span class="{_kind(part)}">{_mathml(part, "inline")}</span>'
                for part in _parts(formula)
            )
            made += [
                text[last : start + first],
                lines.removesuffix("</span>"),
                mark.group() if mark else "",
                "</span>",
            ]
            last = start + after + (mark.end() if mark else 0)
        end = skipped.end() if skipped else len(text)
        made.append(text[last:end])
    return "".join(made).replace(_CELL, "|").replace("∣", "\\|")


def _cells(row: re.Match[str]) -> str:
    """Tell the bars between cells from those of norms."""
    return re.sub(r"(?<!\\)\|", _CELL, row.group()).replace("\\|", "∣")


def find(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the formulas of a stretch of prose begin and end."""
    words = [match.span() for match in re.finditer(r"\S+", text)]
    number = 0
    while number < len(words):
        start, stop = words[number]
        brackets = re.match(r"[(\"]*", text[start:stop])
        runs = (
            _run(text, words, number, start + skip)
            for skip in range(brackets.end() + 1 if brackets else 1)
        )
        end, number = next((run for run in runs if run), (start, number))
        start, end = _trim(text, start, end)
        formula = text[start:end]
        if _is_formula(formula, text[end:]) and not _PLAIN_BEFORE.search(text[:start]):
            yield start, end
        number += 1


def _run(
    text: str, words: list[tuple[int, int]], number: int, start: int
) -> tuple[int, int] | None:
    """Return the end of the longest formula from `start`, in word `number`, and the number of its last word."""
    longest = None
    for last in range(number, len(words)):
        first, stop = max(words[last][0], start), words[last][1]
        word = text[first:stop]
        bare = word if word == "." else re.sub(r'((?:\.\.\.)?)[.,;:"]*$', r"\1", word)
        for inner in (
            (bare, bare[:-1].rstrip(".,;:"), bare[:-2].rstrip(".,;:"))
            if bare.endswith(")")
            else (bare,)
        ):
            if inner and _reads(inner) and _balances(text[start : first + len(inner)]):
                longest = first + len(inner), last
                break
        if not _reads(bare) or (
            bare != word
            and (word[len(bare) :] != "," or _balances(text[start : first + len(bare)]))
        ):
            break
    return longest


def _reads(word: str) -> bool:
    if word in _RELATIONS:
        return True
    place = 0
    while place < len(word):
        atom = _ATOM.match(word, place)
        if not atom:
            return False
        place = atom.end()
    return True


def _balances(text: str) -> bool:
    level = 0
    for sign in text:
        level += (sign in "([{") - (sign in ")]}")
        if level < 0:
            return False
    return level == 0 and all(text.count(sign) % 2 == 0 for sign in "‖|∣")


_PLAIN_BEFORE = re.compile(r"\d\s+$")
"""A letter behind a number is no formula of its own: 3 x 3."""
_BEFORE = re.compile(
    r"(?:[aAI](?! (?:[=<>≤≥≠·→∝∘∈×+−/]|<=|>=|->))|\([a-z]\)|\(?\d+\.\d+\)?(?= \()|[-−+.,/])\s+"
)
_BEHIND = re.compile(r"\s+(?:(?<![=<>≤≥·→+−/] )[aI]|[-−+×.,/=<>≤≥→]|<=|>=|->|\(\d+(?:\.\d+)*\))$")


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """Leave out articles, labels, numbers of sections and dashes at the ends."""
    while before := _BEFORE.match(text, start, end):
        start = before.end()
    while behind := _BEHIND.search(text[start:end]):
        end = start + behind.start()
    return start, end


def _is_formula(text: str, behind: str) -> bool:
    if re.fullmatch(_SYMBOL, text):
        return text not in "aAI" or bool(re.match(r"[,;:)]| \(", behind))
    if text in ("n/a", "I/O") or not _balances(text) or re.match(rf"{_RELATION}|\([\d.]+\)$", text):
        return False
    return bool(_SIGN.search(text) and re.search(r"[^\W\d]|[\^√∞≤≥⁰-⁹]", text))


def _parts(formula: str) -> Iterator[str]:
    """Yield a long formula up to each relation outside of brackets: there a line may end."""
    start = 0 if len(formula) > _LINE else len(formula)
    for relation in re.finditer(r"(?<= )(?:<=|>=|->|[=<>≤≥≠→∝])(?= )", formula):
        if start < relation.start() and _balances(formula[start : relation.start()]):
            yield formula[start : relation.start()].strip()
            start = relation.start()
    yield formula[start:] or formula


def _kind(part: str) -> str:
    return "math wide" if len(part) > 2 * _LINE else "math"


def _mathml(line: str, display: str) -> str:
    from latex2mathml.converter import convert  # of the site's environment, not the tests'

    return convert(tex(line), display=display)


def tex(line: str) -> str:
    """Return the TeX of one line of plain text."""
    text = unicodedata.normalize("NFD", line.strip()).replace("sqrt(", "√(")
    text = re.sub(r"\bsqrt ", "√", text).replace("_inf", "_∞")
    text = re.sub(r"\^(-?\d+/\d+)", r"^{\1}", text)
    text = re.sub(r"√(?!\()((?:[A-Za-z]+|.)(?:_\w+|[₀-₉]+)?)", r"√(\1)", text)
    text = re.sub(r"(?<![A-Za-z_])([A-Za-z]{2,})(?=(.?))", _word, text)
    text = re.sub("(.)\u0304", r"\\bar{\1}", text)
    text = unicodedata.normalize("NFC", text)
    for signs, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        text = re.sub(
            f"[{''.join(signs)}]+",
            lambda run: f"{mark}{{{''.join(signs[c] for c in run.group())}}}",  # noqa: B023
            text,
        )
    text = re.sub(r"([_^])\(([^()]*)\)", r"\1{\2}", text)
    text = re.sub(r"([_^])(-?[A-Za-z0-9]+(?:,[A-Za-z0-9]+)*)", r"\1{\2}", text)
    text = _roots(re.sub(r" {3,}", r" \\quad ", text))
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    return text


def _roots(text: str) -> str:
    while (start := text.find("√")) >= 0:
        end, depth = start + 2, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = f"{text[:start]}\\sqrt{{{text[start + 2 : end - 1]}}}{text[end:]}"
    return text


def _word(found: re.Match[str]) -> str:
    word, after = found.groups()
    if word in _COMMANDS:
        return f"\\{_COMMANDS[word]} "
    if after != "(" and (word.isupper() or (word[0].isupper() and len(word) == 2)):  # a product
        return " ".join(word)
    if word[0] == "d" and len(word) == 2:  # a differential
        return f"d {word[1]}"
    return f"\\operatorname{{{word}}}" if after and after in "(_[" else f"\\text{{ {word} }}"
