"""Tasks follow from seeds, scores from the text, and nothing is imported before it is used."""

import subprocess
import sys

import pytest

from farcast.config import TaskConfig
from farcast.errors import ConfigError, ScoringError
from farcast.rollout import Letters, Task, check_task, make_environment, seed_of


def test_letters_rewards_the_share_of_the_letter_that_was_asked_for() -> None:
    task = Task(question="", answer="b")
    letters = Letters(letters="ab", count=8)
    rewards = {
        text: letters.score(task, text).reward for text in ("", "bbbb", "bbabbbcb", "B " * 10)
    }
    assert rewards == {"": 0.0, "bbbb": 0.5, "bbabbbcb": 0.75, "B " * 10: 1.0}
    assert letters.score(task, "b" * 16 + "a" * 16).reward == 0.5


def test_letters_asks_for_each_letter() -> None:
    letters = Letters(letters="abc", count=3)
    assert letters.task(1).question == "Write the letter b 3 times."
    assert {letters.task(seed).answer for seed in range(9)} == set("abc")
    assert letters.task(7) == letters.task(7)


@pytest.mark.parametrize(
    "task",
    [
        TaskConfig(name="nonsense"),
        TaskConfig(name="letters", params={"colour": 1}),
        TaskConfig(name="letters", params={"letters": ""}),
        TaskConfig(name="letters", params={"letters": "a1"}),
        TaskConfig(name="letters", params={"count": 0}),
    ],
    ids=lambda t: str(t.params or t.name),
)
def test_a_task_that_is_not_known_is_a_config_error(task: TaskConfig) -> None:
    with pytest.raises(ConfigError):
        make_environment(task)
    with pytest.raises(ConfigError):
        check_task(task)


def test_seeds_differ_by_worker_by_start_and_by_count_and_never_change() -> None:
    drawn = {
        seed_of(worker, start, count)
        for worker in ("w0", "w1")
        for start in (0, 7)
        for count in range(50)
    }
    assert len(drawn) == 200
    assert all(0 <= seed < 1 << 31 for seed in drawn)
    assert seed_of("w0", 0, 0) == 1500788977
    assert seed_of("ab", "c") != seed_of("a", "bc")


def test_rollout_imports_neither_engine_nor_task_library() -> None:
    script = (
        "import sys, farcast.rollout\n"
        "heavy = {'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_tasks_follow_from_the_seed(self) -> None:
        task = TaskConfig(name="reasoning_gym/chain_sum", params={"max_terms": 3, "max_digits": 2})
        one, two = make_environment(task), make_environment(task)
        assert one.name == "reasoning_gym/chain_sum"
        assert one.task(5) == two.task(5)
        assert len({one.task(seed).question for seed in range(20)}) > 15

    def test_the_answer_is_what_stands_in_the_last_tag_or_all_of_the_text(self) -> None:
        gym = make_environment(TaskConfig(name="reasoning_gym/chain_sum"))
        task = gym.task(3)
        for text in (
            task.answer,
            f" {task.answer}\n",
            f"So <answer>0</answer> <answer>{task.answer}</answer>.",
        ):
            assert gym.score(task, text).reward == 1.0
            assert gym.score(task, text).parts == {"exact": 1.0}
        wrong = gym.score(task, "nothing of use")
        assert wrong.reward < 0.1
        assert wrong.parts == {"exact": 0.0}

    def test_unknown_sets_and_params_are_config_errors(self) -> None:
        for task in (
            TaskConfig(name="reasoning_gym/nonsense"),
            TaskConfig(name="reasoning_gym/chain_sum", params={"colour": 1}),
            TaskConfig(name="reasoning_gym/chain_sum", params={"min_terms": -5}),
        ):
            with pytest.raises(ConfigError):
                make_environment(task)

    def test_a_scorer_that_fails_is_no_reward_of_zero(self) -> None:
        gym = make_environment(TaskConfig(name="reasoning_gym/chain_sum"))
        broken = Task(question="", metadata={})
        with pytest.raises(ScoringError):
            gym.score(broken, "1")
