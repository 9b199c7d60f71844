"""A rank of the trainer that follows: it holds its share of the model and keeps in step.

It takes the same collectives as the trainer in `trainer_process`, in the same order; what it is
not told it does not decide. Refuses to run by itself.
"""

import contextlib
from pathlib import Path

from farcast.config import RunConfig
from farcast.fleet.ranks import Lines
from farcast.fleet.signals import StopRequest
from farcast.fleet.trainer_process import (
    load_policy,
    make_trainer,
    open_publisher,
    prepared,
)
from farcast.store import PatientStore, open_store
from farcast.store.archive import Archive
from farcast.train.loop import to_publish
from farcast.train.team import Team
from farcast.trajectory import TrajectoryReceiver


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
        trainer = make_trainer(
            config, archive, policy, publisher, receiver, team, report=lambda _: None
        )
        trainer.resume()
        if publisher.newest is None:
            publisher.publish(to_publish(policy, publisher), 0)
        trainer.run()
