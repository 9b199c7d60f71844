"""What a process tells whoever follows its log."""

import re
import time

SAID = re.compile(r"\d\d:\d\d:\d\d  ")
"""How such a line begins."""


def say(text: str) -> None:
    """One line with the time, at once."""
    print(f"{time.strftime('%H:%M:%S')}  {plain(text)}", flush=True)


def plain(text: str) -> str:
    """Text that no terminal obeys and that stays on its line: what is not printable is written as
    in a Python string. For words that others wrote, an error's about their records included."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
