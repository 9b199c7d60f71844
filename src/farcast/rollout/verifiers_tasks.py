"""Tasksets of the verifiers library (0.4, its `verifiers.v1`), scored by their own rewards.

What is taken over is what needs no machine beside the model: a prompt, one answer, and rewards and
metrics that read the answer. The reward is the library's weighted sum; each reward and each metric
is also a named part. Refuses, when it is built and with the reason, a taskset that needs a
container, tool servers, set-up in a runtime, judges or a reward that inspects a runtime: there,
let verifiers run the episodes itself and record them (see docs/environments.md).
"""

import asyncio
import inspect
import re
from collections.abc import Mapping
from importlib.metadata import packages_distributions, requires
from itertools import islice
from typing import Any

from farcast.errors import ConfigError, MissingDependencyError, ScoringError
from farcast.rollout.environment import Score, SingleTurn, Task

MAX_TASKS = 1 << 20
"""Tasks of a taskset that are held in memory; of one that never ends, as many as are read."""

ENDLESS_TASKS = 1 << 12

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_OWN = "verifiers.v1.tasksets"
_RESERVED = frozenset({"id", "task", "system_prompt"})
"""Settings that name code to import or a file to read. They would come out of the store."""


def load_taskset(name: str, params: Mapping[str, Any]) -> Any:
    """The taskset that is installed here as `name`, with plain values as its settings.

    Raises `ConfigError` when there is none, or for a package that was not made for verifiers: a
    name out of a store must not import whatever else is installed."""
    vf = _library()
    module = name.replace("-", "_").lower()
    if _NAME.fullmatch(name) is None or not _made_for_verifiers(module):
        raise ConfigError(
            f"No taskset {name[:60]!r} is installed here; install its package, or correct the "
            "task's name."
        )
    if _RESERVED & set(params) or not all(map(_is_plain, params.values())):
        raise ConfigError(
            "The params of a verifiers task are numbers, words, and lists of them, without id, "
            "task and system_prompt; correct the task's params."
        )
    from verifiers.v1.utils.loaders import taskset_config_type

    try:
        return vf.load_taskset(taskset_config_type(name).model_validate({"id": name, **params}))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"The taskset {name} does not load with these params ({_first_line(error)}); correct "
            "them."
        ) from error


class VerifiersTasks(SingleTurn):
    """The tasks of one `verifiers.v1.Taskset`, drawn by seed."""

    def __init__(self, taskset: Any) -> None:
        self._vf = _library()
        self._name = f"verifiers/{taskset.config.id or type(taskset).__name__}"
        limit = MAX_TASKS if taskset.bounded else ENDLESS_TASKS
        self._tasks = list(islice(taskset, limit))
        if not self._tasks:
            raise ConfigError(f"The taskset {self._name} has no tasks; correct its params.")
        if type(taskset).toolsets(taskset.config):
            raise self._unfit("its tools are servers")
        self._check(self._tasks[0])
        if not all(_is_one_question(task.data.prompt) for task in self._tasks):
            raise self._unfit("its prompts are more than one user's text")

    @property
    def name(self) -> str:
        return self._name

    def task(self, seed: int) -> Task:
        index = seed % len(self._tasks)
        data = self._tasks[index].data
        return Task(question=_question(data), metadata={"index": index})

    def score(self, task: Task, text: str) -> Score:
        chosen = self._tasks[task.metadata["index"]]
        trace = self._trace(chosen, task.question, text)
        try:
            asyncio.run(chosen.score(trace))
        except Exception as error:  # whatever an author's reward raises on a model's text
            raise ScoringError(
                f"{self._name} failed at an answer ({type(error).__name__}); the episode is "
                "aborted."
            ) from error
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward}
        parts |= {name: value for name, value in trace.metrics.items() if value is not None}
        return Score(reward=trace.reward, parts=parts)

    def _trace(self, task: Any, question: str, text: str) -> Any:
        from verifiers.v1.graph import MessageNode

        vf = self._vf
        asked = MessageNode(message=vf.UserMessage(content=question))
        said = MessageNode(parent=0, sampled=True, message=vf.AssistantMessage(content=text))
        return vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=[asked, said],
            is_completed=True,
            ok=True,
        )

    def _check(self, task: Any) -> None:
        """Whether all that scores this task can do so from the answer alone. `Task.score` leaves
        out what cannot, and its sum would be another reward than the author's."""
        base = self._vf.Task
        if task.NEEDS_CONTAINER:
            raise self._unfit("it needs a container")
        if type(task).toolsets(task.config):
            raise self._unfit("its tools are servers")
        for hook in ("setup", "finalize"):
            if getattr(type(task), hook) is not getattr(base, hook):
                raise self._unfit(f"its {hook} prepares a runtime")
        if task.config.judges:
            raise self._unfit("a judge scores it")
        hooks = [*task.hooks("reward"), *task.hooks("metric")]
        if not task.hooks("reward") or any(map(_inspects_runtime, hooks)):
            raise self._unfit("its rewards do not follow from the answer")

    def _unfit(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._name} cannot be played by a worker: {why}; let verifiers run it through "
            "`farcast record` instead."
        )


def _library() -> Any:
    try:
        import verifiers.v1 as vf
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "The task needs the verifiers library; install farcast[verifiers]."
        ) from error
    return vf


def _made_for_verifiers(module: str) -> bool:
    from importlib.util import find_spec

    if find_spec(f"{_OWN}.{module}") is not None:
        return True
    needed = [
        requirement
        for distribution in packages_distributions().get(module, ())
        for requirement in requires(distribution) or ()
    ]
    return any(re.match(r"verifiers\b(?!-)", requirement) for requirement in needed)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, (str, int, float)) for item in value)
    return isinstance(value, (str, int, float))


def _inspects_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _is_one_question(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    shown = prompt or ()
    return bool(shown) and all(
        message.role in ("system", "user") and isinstance(message.content, str) for message in shown
    )


def _question(data: Any) -> str:
    """The system prompt and the user's, as one turn: the run's own system prompt stays."""
    parts = [data.system_prompt, data.prompt_text]
    return "\n\n".join(part for part in parts if part)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
