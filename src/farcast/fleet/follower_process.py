"""A rank of the trainer that follows: it holds its share of the model and keeps in step.

It takes the same collectives as the trainer in `trainer_process`, in the same order; what it is
not told it does not decide. Refuses to run by itself.
"""

import contextlib
from pathlib import Path

from farcast.config import RunConfig
from farcast.fleet.ranks import Lines, checkpoint_folder
from farcast.fleet.signals import StopRequest
from farcast.fleet.trainer_process import (
    GROUP_TIMEOUT,
    load_policy,
    open_publisher,
    prepared,
    root_reader,
)
from farcast.store import PatientStore, open_store
from farcast.store.archive import Archive
from farcast.train.checkpoint import Checkpoints
from farcast.train.loop import Trainer
from farcast.train.team import Team
from farcast.trajectory import GroupBatcher, TrajectoryReceiver


def run_follower(
    config: RunConfig, lines: Lines, *, stop: StopRequest, cache: Path | None = None
) -> None:
    """Follow until the leader ends the run."""
    team = Team(lines.team)
    team.together(lambda: None)  # the leader has opened or made the run
    store = PatientStore(open_store(config.store), config.train.store_patience, wait=stop.wait)
    archive = Archive(store, config.run_id)
    policy = load_policy(config, prepared(config, cache), team)
    with (
        open_publisher(config, store, lines) as publisher,
        contextlib.closing(TrajectoryReceiver(store, config.run_id)) as receiver,
    ):
        trainer = Trainer(
            policy,
            config.train,
            run_id=config.run_id,
            publisher=publisher,
            receiver=receiver,
            batcher=GroupBatcher(
                config.run_id,
                max_staleness=config.train.max_staleness,
                group_timeout=GROUP_TIMEOUT,
            ),
            checkpoints=Checkpoints(checkpoint_folder(config, team.rank), config.run_id),
            root_of=root_reader(archive),
            report=lambda _: None,
            team=team,
        )
        trainer.resume()
        if publisher.newest is None:
            publisher.publish(policy.served(), 0)
        trainer.run()
