"""From a `TaskConfig` to its environment.

letters                  `farcast.rollout.letters`
reasoning_gym/<set>      a set of reasoning-gym, such as reasoning_gym/chain_sum
"""

import contextlib

from farcast.config import TaskConfig
from farcast.errors import ConfigError, MissingDependencyError
from farcast.rollout.environment import Environment
from farcast.rollout.extraction import LastInteger
from farcast.rollout.letters import Letters

_GYM = "reasoning_gym/"


def make_environment(task: TaskConfig) -> Environment:
    """Build the environment that a run names. Raises `ConfigError` for one that is not known."""
    environment = _named(task)
    return LastInteger(environment) if task.extract == "last_integer" else environment


def check_task(task: TaskConfig) -> None:
    """Raise `ConfigError` for a task that is not known, as far as this machine can tell: one that
    only trains need not have the library of its tasks."""
    with contextlib.suppress(MissingDependencyError):
        make_environment(task)


def _named(task: TaskConfig) -> Environment:
    if task.name == Letters.name:
        try:
            return Letters(**task.params)
        except TypeError as error:
            raise ConfigError(
                f"The letters task does not take these params ({error}); it knows letters, count."
            ) from error
    if task.name.startswith(_GYM):
        from farcast.rollout.gym import ReasoningGym

        return ReasoningGym(task.name.removeprefix(_GYM), task.params)
    raise ConfigError(f"There is no task {task.name[:60]!r}; name letters or reasoning_gym/<set>.")
