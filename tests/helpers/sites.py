"""Who calls a function: a stand-in that notes each place in the code, and multiplies what it
returns at one of them.
"""

import sys
from collections.abc import Callable
from typing import Any

Site = tuple[str, int, int]
"""File, line, and place within the code, of a call."""


class Sites:
    """Stands for `function`. reached: who called it. further: the caller whose result grows, by the
    factor.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.factor = 1.0
        self.reached: set[Site] = set()
        self.further: Site | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        site = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
        self.reached.add(site)
        found = self.function(*args, **named)
        return found * self.factor if site == self.further else found
