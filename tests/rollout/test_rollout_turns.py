"""Episodes of several turns: what the engine was shown is in the record, what it wrote is as
sampled, and only that is in the loss."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from farcast.config import SamplingConfig, TaskConfig
from farcast.engines.base import Completion
from farcast.errors import ConfigError, ScoringError
from farcast.rollout import (
    Calculator,
    Conversation,
    Reply,
    Score,
    Task,
    Worker,
    WorkerCounters,
    make_environment,
)
from farcast.rollout.calculator import calculate
from farcast.store.memory import MemoryStore
from farcast.trajectory import Trajectory, TrajectoryReceiver, TrajectorySender, check_trajectory
from farcast.types import VersionRef
from trajectory_world import RUN, root_of, span

END = 4
"""The end token of a model's turn."""


class Codec:
    """Bytes as ids; [5, ...] opens a prompt, [6, ...] a reply, 7 the model's turn."""

    def encode_prompt(self, text: str) -> list[int]:
        return [5, *text.encode(), 7]

    def encode_reply(self, text: str, role: str) -> list[int]:
        return [6, *role.encode(), *text.encode(), 7]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != END).decode()


Say = Callable[[str, int], str]


class Scripted:
    """An engine that says what `say` makes of the prompt's text and the row's number. A commit
    falls before every call."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.calls: list[list[tuple[int, ...]]] = []
        self.finish: Callable[[int], str] = lambda _: "stop"

    @property
    def version(self) -> VersionRef:
        return VersionRef(RUN, len(self.calls), root_of(len(self.calls)))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seed: int
    ) -> list[Completion]:
        assert sampling.max_new_tokens
        assert seed >= 0
        self.calls.append([tuple(p) for p in prompts])
        made = []
        for row, prompt in enumerate(prompts):
            text = bytes(i for i in prompt if i > 7).decode()
            ids = (*self.say(text, row).encode(), END)
            logprobs = tuple(-0.5 - i / 64 for i in range(len(ids)))
            whole = (span(0, len(ids), len(self.calls)),)
            made.append(Completion(ids, logprobs, whole, self.finish(row)))  # type: ignore[arg-type]
        return made


def computes(text: str, row: int) -> str:
    """Even rows use the tool and repeat what it said; odd ones guess."""
    sum_ = re.search(r"What is (.*?)\?", text)
    assert sum_ is not None
    said = re.findall(r"observation(-?\d+)", text)
    if said:
        return f"<answer>{said[-1]}</answer>"
    return "<answer>12</answer>" if row % 2 else f"<calc>{sum_.group(1)}</calc>"


class World:
    def __init__(self, say: Say = computes, environment: Any = None, **task: Any) -> None:
        self.store = MemoryStore()
        self.engine = Scripted(say)
        self.environment = environment or Calculator()
        self.task = TaskConfig(name="calculator", **task)

    def run(
        self, stop: Callable[[], bool] | None = None
    ) -> tuple[WorkerCounters, list[Trajectory]]:
        """One round of one group of four."""
        reports: list[WorkerCounters] = []
        counters = Worker(
            self.engine,
            self.environment,
            Codec(),
            TrajectorySender(self.store, RUN, "w0"),
            group_size=4,
            task=self.task,
            sampling=SamplingConfig(max_new_tokens=64, batch_groups=1),
            report=reports.append,
            stop=stop or (lambda: bool(reports)),
        ).run()
        receiver = TrajectoryReceiver(self.store, RUN)
        home = receiver.consume(100)
        receiver.close()
        return counters, home


def test_for_every_turn_the_record_holds_the_prompt_that_the_engine_was_given() -> None:
    world = World()
    counters, home = world.run()
    prompts = [prompt for call in world.engine.calls for prompt in call]
    assert counters.tokens == sum(sum(t.loss_mask) for t in home)
    recorded = [t.prompt_of(turn) for t in home for turn in t.model_turns]
    assert sorted(recorded) == sorted(prompts)
    assert len(recorded) == 2 * 2 + 2 * 1


def test_prompts_are_the_tokens_before_and_the_reply_and_nothing_is_encoded_again() -> None:
    """The rule: prompt n+1 = prompt n + what was sampled + encode_reply(what was said)."""
    _, home = World().run()
    codec = Codec()
    for t in home:
        prompt: tuple[int, ...] = ()
        for before, turn in zip((None, *t.turns), t.turns, strict=False):
            words = t.token_ids[turn.start : turn.end]
            if turn.role == "user":
                assert before is None
                assert words == tuple(codec.encode_prompt(bytes(words[1:-1]).decode()))
            elif turn.role == "observation":
                said = bytes(words[1:-1]).decode().removeprefix("observation")
                assert words == tuple(codec.encode_reply(said, "observation"))
            else:
                assert t.prompt_of(turn) == prompt
            prompt += words
        assert prompt == t.token_ids


def test_each_turn_has_its_role_times_versions_and_mask() -> None:
    _, home = World().run()
    for t in home:
        check_trajectory(t)
        roles = [turn.role for turn in t.turns]
        called = int(t.id[-1]) % 2 == 0
        assert roles == ["user", *(["tool_call", "observation"] if called else []), "model"]
        assert [turn.start for turn in t.turns] == [0, *(turn.end for turn in t.turns[:-1])]
        for turn in t.turns:
            sampled = turn.role in ("model", "tool_call")
            assert set(t.loss_mask[turn.start : turn.end]) == {sampled}
            assert set(t.logprobs[turn.start : turn.end]) != {0.0} or not sampled
        times = [time for turn in t.turns for time in (turn.started, turn.ended)]
        assert times == sorted(times)
        assert [(s.start, s.end) for s in t.spans] == [(u.start, u.end) for u in t.model_turns]
        assert [s.version for s in t.spans] == list(range(1, len(t.model_turns) + 1))
        assert (t.reward, t.rewards["calls"]) == ((1.0, 1.0) if called else (0.0, 0.0))
        assert t.finish_reason == "stop"


def test_what_is_neither_call_nor_answer_is_told_so_until_the_turns_are_spent() -> None:
    world = World(lambda *_: "hm", max_turns=3)
    _, home = world.run()
    for t in home:
        assert [u.role for u in t.turns] == ["user", *["model", "feedback"] * 2, "model"]
        assert [u.feedback for u in t.model_turns] == ["neither a call nor an answer"] * 3
        assert (t.finish_reason, t.reward) == ("length", 0.0)


def test_an_episode_ends_before_its_prompt_would_be_too_long() -> None:
    world = World(lambda *_: "<calc>1</calc>", max_tokens=400, max_turns=100)
    _, home = world.run()
    for t in home:
        assert 300 < len(t.token_ids) <= 400
        assert t.finish_reason == "length"
        assert t.turns[-1].role == "tool_call"


def test_a_turn_that_was_cut_ends_the_episode() -> None:
    world = World()
    world.engine.finish = lambda row: (
        "length" if row == 0 and len(world.engine.calls) == 1 else "stop"
    )
    _, home = world.run()
    cut, _, whole, _ = home
    assert ([u.role for u in cut.turns], cut.finish_reason) == (["user", "tool_call"], "length")
    assert whole.finish_reason == "stop"


class Failing:
    """Cannot reply to the second turn, or cannot score what was cut."""

    name = "failing"

    def __init__(self, *, cuts: bool) -> None:
        self.cuts = cuts

    def task(self, seed: int) -> Task:
        return Task(question=f"What is 1? {seed}")

    def begin(self, task: Task) -> Conversation:
        assert task.question
        turns = 0
        cuts = self.cuts

        class Open:
            def reply(self, text: str) -> Reply:
                nonlocal turns
                turns += 1
                if turns == 2 and not cuts:
                    raise ScoringError(f"cannot say anything to {text}")
                return Reply(text="go on", role="user")

            def cut(self) -> Score:
                raise ScoringError("cannot score that")

        return Open()


@pytest.mark.parametrize("cuts", [False, True])
def test_an_environment_that_fails_in_between_aborts_the_episode(cuts: bool) -> None:
    counters, home = World(lambda *_: "hm", Failing(cuts=cuts), max_turns=2).run()
    assert counters.aborted == 4
    assert {(t.finish_reason, t.reward) for t in home} == {("aborted", 0.0)}
    assert all(len(t.model_turns) == 2 for t in home), "what was sampled is in the record"


def test_a_stop_between_two_turns_releases_the_group_at_once() -> None:
    world = World()
    counters, home = world.run(lambda: bool(world.engine.calls))
    assert len(world.engine.calls) == 1
    assert [t.finish_reason for t in home] == ["aborted", "stop", "aborted", "stop"]
    assert counters.aborted == 2


def test_the_calculator_runs_nothing() -> None:
    assert calculate(" (2 + 3) * -4 // 3 % 5 ") == str((2 + 3) * -4 // 3 % 5)
    assert calculate("1 // 0") == "error: division by zero"
    for hostile in (
        "2 ** 99",
        "__import__('os')",
        "1.5",
        "True",
        "a",
        "(" * 110,
        "9 * " * 50,
        "\0",
    ):
        assert calculate(hostile).startswith("error: only"), hostile
    with pytest.raises(ConfigError):
        make_environment(TaskConfig(name="calculator", params={"digits": 0}))
    with pytest.raises(ConfigError, match="several turns"):
        make_environment(TaskConfig(name="calculator", extract="last_integer"))


def test_an_installed_package_brings_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_tasks.py").write_text("from farcast.rollout import Calculator as Mine\n")
    info = tmp_path / "my_tasks-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: my_tasks\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text("[farcast.environments]\nmine = my_tasks:Mine\n")
    environment = make_environment(TaskConfig(name="mine", params={"digits": 1}))
    assert len(environment.task(1).question) < len(Calculator(digits=9).task(1).question)
    with pytest.raises(ConfigError, match="does not take these params"):
        make_environment(TaskConfig(name="mine", params={"colour": 1}))


def test_a_chat_template_gives_the_ids_between_two_turns() -> None:
    """What a worker puts together is what the template makes of the whole chat."""
    pytest.importorskip("torch")
    from tests.models import tiny_folder
    from transformers import AutoTokenizer

    from farcast.engines.chat import ChatCodec

    task = TaskConfig(system="Be kind.", answer_prefix="So:")
    codec = ChatCodec.from_folder(tiny_folder(), task)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    for role, named in (("observation", "user"), ("feedback", "user")):
        chats = ChatCodec(tokenizer, task)
        said = tokenizer("Hm.<|end|>", add_special_tokens=False)["input_ids"]
        together = [*chats.encode_prompt("Hi?"), *said, *chats.encode_reply("Yes?", role)]
        chat = (
            "[system]Be kind.<|end|>\n[user]Hi?<|end|>\n[assistant]So:Hm.<|end|>\n"
            f"[{named}]Yes?<|end|>\n[assistant]So:"
        )
        assert together == tokenizer(chat, add_special_tokens=False)["input_ids"]
    assert codec.decode(codec.encode_reply("Yes?", "user")) == "\nYes?\n>So:"
    tokenizer.chat_template += "{# tool #}"
    assert "[tool]Yes?" in tokenizer.decode(
        ChatCodec(tokenizer, task).encode_reply("Yes?", "observation")
    )
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ConfigError, match="drops"):
        ChatCodec(tokenizer, task).encode_reply("Yes?", "user")
