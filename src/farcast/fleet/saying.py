"""What a process tells whoever follows its log."""

import re
import time

SAID = re.compile(r"\d\d:\d\d:\d\d  ")
"""How such a line begins."""


def say(text: str) -> None:
    """One line with the time, at once."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
