"""Tasksets of the real verifiers library, where it is installed: `make setup` installs it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcast.config import TaskConfig
from farcast.errors import ConfigError, ScoringError
from farcast.rollout import make_environment

vf = pytest.importorskip("verifiers.v1")

from farcast.rollout.verifiers_tasks import VerifiersTasks  # noqa: E402

PACKAGE = """
import verifiers.v1 as vf

class Row(vf.TaskData):
    answer: str

class Echo(vf.Task[Row]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class EchoConfig(vf.TasksetConfig):
    size: int = 5

class Echoes(vf.Taskset[Echo, EchoConfig]):
    def load(self):
        for i in range(self.config.size):
            row = Row(prompt=f"Say {i}.", answer=str(i), system_prompt="Be brief.")
            yield Echo(row, self.config.task)

__all__ = ["Echoes"]
"""


def install(folder: Path, name: str, source: str, needs: str) -> None:
    """As pip would, in a folder of its own."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n"
    )
    info.joinpath("top_level.txt").write_text(f"{name}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "echo_tasks", PACKAGE, "verifiers>=0.4")
    yield tmp_path
    sys.modules.pop("echo_tasks", None)


def taskset(task: type, *, prompt: Any = "Say 0.") -> Any:
    class Tasks(vf.Taskset[task, vf.TasksetConfig]):  # type: ignore[valid-type]
        def load(self) -> Any:
            yield task(vf.TaskData(prompt=prompt), self.config.task)

    return Tasks(vf.TasksetConfig(id="made-here"))


@pytest.mark.usefixtures("packages")
def test_an_installed_taskset_is_a_task_by_its_name() -> None:
    environment = make_environment(TaskConfig(name="verifiers/echo-tasks", params={"size": 3}))
    assert environment.name == "verifiers/echo-tasks"
    task = environment.task(7)
    assert (task, task.question) == (environment.task(4), "Be brief.\n\nSay 1.")
    right = environment.begin(task).reply("1").score
    assert right is not None
    assert (right.reward, right.parts) == (2.0, {"right": 1.0, "length": 1.0})
    wrong = environment.begin(task).reply("one").score
    assert wrong is not None
    assert (wrong.reward, wrong.parts["length"]) == (0.0, 3.0)


def test_a_name_imports_nothing_that_was_not_made_for_it(packages: Path) -> None:
    canary = packages / "canary"
    install(packages, "stranger", f"open({str(canary)!r}, 'w')", "verifiers-monitor")
    for name in ("stranger", "os", "no_such_thing", "../echo_tasks", "verifiers.v1.task", ""):
        with pytest.raises(ConfigError, match="is installed here"):
            make_environment(TaskConfig(name=f"verifiers/{name}"))
    assert not canary.exists()


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    "params",
    [
        {"task": {"rewards": {"x": {"fn": "os.getcwd"}}}},
        {"system_prompt": "/etc/passwd"},
        {"id": "other"},
        {"size": {"fn": "os.getcwd"}},
        {"size": "many"},
        {"colour": 1},
    ],
    ids=str,
)
def test_params_are_plain_values_of_the_taskset(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_environment(TaskConfig(name="verifiers/echo-tasks", params=params))


class Plain(vf.Task[vf.TaskData]):
    @vf.reward
    async def one(self) -> float:
        return 1.0


class NeedsBox(Plain):
    NEEDS_CONTAINER = True


class NeedsSetup(Plain):
    async def setup(self, trace: Any, runtime: Any) -> None:
        await runtime.run(trace.id)


class Inspects(Plain):
    @vf.reward
    async def files(self, runtime: Any) -> float:
        return float(await runtime.read("x") == b"")


class NeverRewards(vf.Task[vf.TaskData]):
    pass


@pytest.mark.parametrize("task", [NeedsBox, NeedsSetup, Inspects, NeverRewards])
def test_what_a_worker_cannot_play_is_refused_at_once(task: type) -> None:
    with pytest.raises(ConfigError, match="farcast record"):
        VerifiersTasks(taskset(task))


def test_prompts_that_are_no_question_are_refused() -> None:
    said = [vf.UserMessage(content="Hi."), vf.AssistantMessage(content="Hi!")]
    for prompt in (None, "", said):
        with pytest.raises(ConfigError, match="one user's text"):
            VerifiersTasks(taskset(Plain, prompt=prompt))
    asked = [vf.SystemMessage(content="Be kind."), vf.UserMessage(content="Hi.")]
    environment = VerifiersTasks(taskset(Plain, prompt=asked))
    assert environment.task(0).question == "Be kind.\n\nHi."


def test_a_reward_that_fails_is_no_reward_of_zero() -> None:
    class Fails(vf.Task[vf.TaskData]):
        @vf.reward
        async def one(self, trace: Any) -> float:
            raise KeyError(trace.last_reply)

    environment = VerifiersTasks(taskset(Fails))
    with pytest.raises(ScoringError, match="TaskError"):
        environment.score(environment.task(0), "1")
