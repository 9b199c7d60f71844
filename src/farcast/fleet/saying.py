"""What a process tells whoever follows its log."""

import time


def say(text: str) -> None:
    """One line with the time, at once."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
