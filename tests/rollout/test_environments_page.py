"""The code of docs/environments.md runs, and its environments do what the page says."""

import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def test_the_page_runs() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "environments.md", "exec"), names)  # our own text
    reverse = names["Reverse"]()
    score = reverse.begin(reverse.task(0x1F)).reply("f1").score
    assert score is not None
    assert score.reward == 1.0
    guess = names["Guess"]()
    episode = guess.begin(guess.task(13))
    assert episode.reply("hm").role == "feedback"
    assert episode.reply("1").text == "more"
    ended = episode.reply("3").score
    assert (ended.reward, ended.parts) == (1 / 3, {"tries": 3})
