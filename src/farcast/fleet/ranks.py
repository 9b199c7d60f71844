"""A trainer on several ranks, as `torchrun` starts them: rank 0 is the run's trainer, the others
hold their share of the model and do what it does.

Only rank 0 creates the run, reads trajectories, keeps records and answers for the run. Every rank
writes its own share of the checkpoints, in a folder of its own. Refuses nothing by itself.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from farcast.config import RunConfig, decode_config, encode_config
from farcast.errors import ConfigError
from farcast.fleet.layout import RunFolder
from farcast.publish.comms import Comms, Rounds

SLACK = 900.0
"""Seconds that a rank waits for the others beyond a store's patience: a first version of a large
model, or a model that one rank has to prepare."""


class Place(NamedTuple):
    """Which rank this process is, of how many."""

    rank: int
    ranks: int


class Lines(NamedTuple):
    """How the ranks talk: about what to do, and, in the background, about versions."""

    team: Comms
    publish: Comms


def place() -> Place:
    """What torchrun says in the environment, which is how it says anything; alone without it."""
    try:
        found = Place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError:
        raise ConfigError(
            "RANK and WORLD_SIZE in the environment are no numbers; start ranks with torchrun."
        ) from None
    return found if found.ranks > 1 else Place(0, 1)


def join(settings: Callable[[], RunConfig]) -> tuple[RunConfig, Lines]:
    """Meet the other ranks; `settings` is called on rank 0, and all get what it returns."""
    import torch.distributed as dist

    from farcast.publish.torch_comms import TorchComms

    dist.init_process_group("gloo")
    first = TorchComms()
    told = Rounds(first).broadcast(lambda: encode_config(settings()))
    config = decode_config(told, RunConfig)
    timeout = config.train.store_patience + SLACK
    return config, Lines(TorchComms(timeout=timeout), TorchComms(timeout=timeout))


def checkpoint_folder(config: RunConfig, rank: int) -> Path:
    """Where a rank keeps its checkpoints; rank 0 where a trainer alone would."""
    folder = RunFolder(Path(config.out)).checkpoint
    return folder if rank == 0 else folder.with_name(f"{folder.name}-rank-{rank:04d}")
