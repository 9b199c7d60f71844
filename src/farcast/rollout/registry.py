"""From a `TaskConfig` to its environment.

letters                  `farcast.rollout.letters`
calculator               `farcast.rollout.calculator`, with a tool, over several turns
reasoning_gym/<set>      a set of reasoning-gym, such as reasoning_gym/chain_sum
verifiers/<taskset>      a taskset of the verifiers library that is installed here
<any other name>         an installed package's entry point in the group `farcast.environments`

The name comes out of the store, so it can choose among what is installed and was made for this,
and nothing else: no name is a module that is imported just because it exists.
"""

import contextlib
from importlib.metadata import entry_points
from typing import Any

from farcast.config import TaskConfig
from farcast.errors import ConfigError, MissingDependencyError
from farcast.rollout.calculator import Calculator
from farcast.rollout.environment import Environment, SingleTurn
from farcast.rollout.extraction import LastInteger
from farcast.rollout.letters import Letters

ENTRY_POINTS = "farcast.environments"

_GYM = "reasoning_gym/"
_VERIFIERS = "verifiers/"


def make_environment(task: TaskConfig) -> Environment:
    """Build the environment that a run names. Raises `ConfigError` for one that is not known."""
    environment = _named(task)
    if task.extract == "text":
        return environment
    if not isinstance(environment, SingleTurn):
        raise ConfigError(
            f"The task {task.name[:60]!r} has several turns, of which no last integer is scored; "
            "set extract to text."
        )
    return LastInteger(environment)


def check_task(task: TaskConfig) -> None:
    """Raise `ConfigError` for a task that is not known, as far as this machine can tell: one that
    only trains need not have the library of its tasks."""
    with contextlib.suppress(MissingDependencyError):
        make_environment(task)


def _named(task: TaskConfig) -> Environment:
    if task.name == Letters.name:
        return _built(Letters, task, "it knows letters, count")
    if task.name == Calculator.name:
        return _built(Calculator, task, "it knows digits")
    if task.name.startswith(_GYM):
        from farcast.rollout.gym import ReasoningGym

        return ReasoningGym(task.name.removeprefix(_GYM), task.params)
    if task.name.startswith(_VERIFIERS):
        from farcast.rollout.verifiers_tasks import VerifiersTasks, load_taskset

        return VerifiersTasks(load_taskset(task.name.removeprefix(_VERIFIERS), task.params))
    for entry in entry_points(group=ENTRY_POINTS, name=task.name):
        return _built(entry.load(), task, "see its own documentation")
    raise ConfigError(
        f"There is no task {task.name[:60]!r}; name letters, calculator, reasoning_gym/<set>, "
        "verifiers/<taskset>, or one of an installed package."
    )


def _built(make: Any, task: TaskConfig, knows: str) -> Environment:
    try:
        environment: Environment = make(**task.params)
    except TypeError as error:
        raise ConfigError(
            f"The {task.name[:60]} task does not take these params ({error}); {knows}."
        ) from error
    return environment
