"""The training loop, read from top to bottom in `Trainer.run`.

    wait for whole, fresh groups -> loss, gradients -> optimizer on the masters -> publish -> report

Sampling never stops for it: workers go on with the version they have, each token's log-prob says
under what it was sampled, and the loss corrects for it. What a long line makes slow overlaps the
computing: a version is published, and the next trajectories are fetched, while the next step finds
its gradients; a checkpoint, which must wait for its version, is written when they are found, just
before they move anything. What the loop had to wait for publishing is measured.

Knows nothing of processes, records or screens: a reporter is passed in.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from farcast.config import TrainConfig
from farcast.errors import BrokenBatchError, ConfigError, RunMismatchError
from farcast.publish import Publisher, PublishJob, PublishReport
from farcast.train.checkpoint import Checkpoints, CheckpointState
from farcast.train.objectives import objective_of
from farcast.train.policy import Policy, served_root
from farcast.train.team import LEADS_EVERY, Choice, Team
from farcast.train.update import UpdateReport, update
from farcast.trajectory import (
    Group,
    GroupBatcher,
    Trajectory,
    TrajectoryReceiver,
    staleness_of,
)
from farcast.trajectory.batching import RootOf, is_root

POLL_SECONDS = 0.1
REMEMBERED_ROOTS = 1024
"""Of this trainer's latest versions; those of tokens that were sampled before are asked for."""

BROKEN_TRIES = 3
"""Reads of a broken batch before it is passed over: what the way here did to it passes, what
stands in the store does not."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step and the version it became. `root` is of the trainer's own tensors; of a
    sharded model, whose tensors no rank has, it is what the publisher's owners found."""

    published: PublishReport
    root: str
    step: int
    reward_mean: float
    reward_std: float
    loss: float
    grad_norm: float
    kl: float
    clipped: float
    """Share of tokens outside the clip range."""
    masked: int
    """Tokens kept out of the loss: too old by `mask_staleness`, or refused by the objective."""
    left_out: int
    """Tokens kept out since a number was not finite."""
    largest_ratio: float
    """Of current to behaviour probability, among the tokens that entered; 0 without one."""
    staleness_mean: float
    staleness_max: int
    consumed: tuple[str, ...]
    dropped: dict[str, tuple[str, ...]]
    tokens: int
    step_seconds: float
    blocked_seconds: float
    waited_seconds: float


class _Update(NamedTuple):
    """What one step did, before its version has a name."""

    groups: Sequence[Group]
    version: int
    """The trainer's version when the step began."""
    report: UpdateReport


def to_publish(policy: Policy, publisher: Publisher) -> dict[str, Any]:
    """What a publisher is given: masters where it derives formats, else what is served."""
    return policy.masters() if publisher.formats else policy.served()


class _Place(NamedTuple):
    """Where a step ended, for the checkpoint of it."""

    step: int
    receiver: dict[str, Any]
    batcher: bytes


class _Pending(NamedTuple):
    """A version on its way, and the report that waits for its name."""

    job: PublishJob
    report: Callable[[PublishReport], StepReport]
    version: int


class Trainer:
    """Trains `policy` on what `receiver` brings, and publishes each step.

    `root_of` knows what was published, so that a span's claim can be checked. `report` is called
    once a step, in order, as soon as its version is durable; `idle` while the loop waits for
    trajectories; `skipped` for each batch that cannot be read, since one damaged object must
    not end a run. `stop` is asked between steps. Of the ranks of a `team` each has a trainer;
    the leader's reads and is stopped, and only its reports are whole.
    """

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        *,
        run_id: str,
        publisher: Publisher,
        receiver: TrajectoryReceiver,
        batcher: GroupBatcher,
        checkpoints: Checkpoints,
        root_of: RootOf,
        report: Callable[[StepReport], None],
        idle: Callable[[], None] = lambda: None,
        skipped: Callable[[BrokenBatchError], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        team: Team | None = None,
    ) -> None:
        self._policy = policy
        self._config = config
        self._objective = objective_of(config)
        self._run_id = run_id
        self._publisher = publisher
        self._receiver = receiver
        self._batcher = batcher
        self._checkpoints = checkpoints
        self._root_of = root_of
        self._roots: dict[int, str] = {}
        self._report = report
        self._idle = idle
        self._skipped = skipped
        self._stop = stop
        self._team = team or Team()
        self._step = 0
        self._saved_step = -1
        self._pending: _Pending | None = None
        self._due: _Place | None = None
        """A checkpoint that is to be written before the next step moves anything."""
        self._broken: tuple[str, int, int] = ("", 0, 0)
        """Worker and sequence of the batch that was refused last, and how often in a row."""
        self._blocked = 0.0
        self._waited = 0.0

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._step

    @property
    def version(self) -> int:
        """The version of the weights that the next step starts from."""
        if self._pending is not None:
            return self._pending.version
        newest = self._publisher.newest
        return -1 if newest is None else newest.version

    def resume(self) -> bool:
        """Continue from the newest checkpoint; False when there is none."""
        own = self._checkpoints.steps()
        steps = self._team.common(own)
        if not steps and self._team.sums([len(own)])[0] > 0:
            raise ConfigError(
                "The ranks have no checkpoint of one and the same step; resume on as many ranks "
                "as before, each with the folder that it had."
            )
        found = self._checkpoints.load(steps[-1]) if steps else None
        if found is None:
            return False
        state, tensors = found
        self._check_lineage(state)
        self._policy.restore(tensors)
        self._receiver.restore(state.receiver)
        self._batcher.restore(state.batcher, now=time.monotonic())
        self._step = self._saved_step = state.step
        # A rank that was quicker may have saved a step that the others lost.
        self._team.together(lambda: self._checkpoints.discard_after(state.step))
        return True

    def _check_lineage(self, state: CheckpointState) -> None:
        """The store must hold what this checkpoint had published: an older copy of the store, or
        another one, would get version numbers a second time with other contents."""
        newest = self._publisher.newest
        if newest is None or newest.version < state.version:
            held = "no version" if newest is None else f"only up to version {newest.version}"
            raise RunMismatchError(
                f"The checkpoint of step {state.step} had published version {state.version}, but "
                f"the store holds {held}; put the run's own store back."
            )
        known = self._root_of(state.version)
        if known is not None and not is_root(state.root, known):
            raise RunMismatchError(
                f"Version {state.version} in the store is not the one that the checkpoint of step "
                f"{state.step} published; put the run's own store back."
            )

    def run(self) -> None:
        """Train until `config.steps` steps are taken or `stop` says so; checkpointed on return.

        The weights before the first step are version 0, so that workers can begin."""
        if self._publisher.newest is None:
            self._publisher.publish(to_publish(self._policy, self._publisher), self._step)
        while self._step < self._config.steps:
            groups = self._wait_for_groups()
            if groups is None:
                break
            began = time.perf_counter()
            self._publish(self._update(groups), began)
            if self._step % self._config.checkpoint_every == 0:
                self._due = self._place()
        self._due = self._place()
        self._checkpoint()

    def _wait_for_groups(self) -> list[Group] | None:
        """Whole groups, fresh enough now; None once asked to stop."""
        began = time.perf_counter()
        while True:
            choice = self._team.choose(self._look_for_groups, self._run_id)
            if choice != "waiting":
                self._waited += time.perf_counter() - began
                return choice

    def _look_for_groups(self) -> Choice:
        """Groups as soon as there are some, but not for long: the others wait for an answer."""
        until = time.monotonic() + LEADS_EVERY
        want = self._config.groups_per_step
        while not self._stop():
            # No more than one step needs: the rest would only wait here instead of in the store.
            room = want - self._batcher.whole_groups()
            read = self._read(room * self._config.group_size) if room > 0 else []
            self._batcher.add(read, now=time.monotonic())
            groups = self._batcher.take(
                want, version=self.version, now=time.monotonic(), root_of=self._known_root
            )
            if groups:
                return groups
            self._settle(block=False)
            self._idle()
            if time.monotonic() > until:
                return "waiting"
            if not read:
                time.sleep(POLL_SECONDS)
        return None

    @property
    def _several(self) -> bool:
        return bool(self._publisher.formats)

    def _known_root(self, version: int) -> str | frozenset[str] | None:
        """What this trainer published it need not ask the store for, which takes a round trip."""
        return self._roots.get(version) or self._root_of(version)

    def _read(self, most: int) -> list[Trajectory]:
        """New trajectories. A batch that stays broken is passed over: it is one worker's, and to
        stop would let any of them, or one damaged object, hold the run for good."""
        try:
            return self._receiver.consume(most)
        except BrokenBatchError as error:
            worker, sequence, tries = self._broken
            same = (worker, sequence) == (error.worker_id, error.sequence)
            self._broken = (error.worker_id, error.sequence, tries + 1 if same else 1)
            if self._broken[-1] >= BROKEN_TRIES:
                self._receiver.skip(error.worker_id)
                self._skipped(error)
            return []

    def _update(self, groups: Sequence[Group]) -> _Update:
        """One step on whole groups."""
        version = self.version
        self._step += 1
        self._prefetch()
        members = [group.members for group in groups]
        report = update(
            self._policy,
            members,
            self._objective,
            self._config,
            version=version,
            step=self._step,
            team=self._team,
            before_moving=self._before_moving,
        )
        return _Update(groups=groups, version=version, report=report)

    def _before_moving(self) -> None:
        self._checkpoint()
        self._prefetch()  # what arrived since the step began

    def _prefetch(self) -> None:
        if self._team.leads:
            self._receiver.prefetch()

    def _publish(self, done: _Update, began: float) -> None:
        """Hand the new weights to the publisher; it is durable when the next step is."""
        self._settle(block=True)
        served = self._policy.served()
        root = served_root(served) if self._team.size == 1 else None
        before = time.perf_counter()
        version = self.version + 1
        tensors = to_publish(self._policy, self._publisher) if self._several else served
        job = self._publisher.publish_async(tensors, self._step)
        self._blocked += time.perf_counter() - before
        seconds = time.perf_counter() - began
        report = self._reporter(done, root, seconds, self._batcher.drain_dropped())
        self._pending = _Pending(job, report, version)

    def _settle(self, *, block: bool) -> None:
        """Report the version on its way once it is durable. An error of publishing surfaces here:
        the run stops at its last checkpoint rather than train on what nobody can serve."""
        if self._pending is None or not (block or self._pending.job.done()):
            return
        before = time.perf_counter()
        published = self._pending.job.report()
        self._blocked += time.perf_counter() - before
        if not self._several:
            self._roots[published.ref.version] = published.ref.root
        while len(self._roots) > REMEMBERED_ROOTS:
            self._roots.pop(next(iter(self._roots)))
        report = self._pending.report(published)
        self._pending = None
        self._report(report)

    def _reporter(
        self,
        done: _Update,
        root: str | None,
        seconds: float,
        dropped: dict[str, tuple[str, ...]],
    ) -> Callable[[PublishReport], StepReport]:
        members = [member for group in done.groups for member in group.members]
        rewards = torch.tensor([member.reward for member in members])
        ages = [staleness_of(member, done.version) for member in members]
        step, waited = self._step, self._waited
        self._waited = 0.0

        def finish(published: PublishReport) -> StepReport:
            blocked, self._blocked = self._blocked, 0.0
            return StepReport(
                published=published,
                root=published.ref.root if root is None else root,
                step=step,
                reward_mean=float(rewards.mean()),
                reward_std=float(rewards.std()) if len(members) > 1 else 0.0,
                loss=done.report.loss,
                grad_norm=done.report.grad_norm,
                kl=done.report.kl,
                clipped=done.report.clipped,
                masked=done.report.masked,
                left_out=done.report.left_out,
                largest_ratio=done.report.largest_ratio,
                staleness_mean=sum(ages) / len(ages),
                staleness_max=max(ages),
                consumed=tuple(member.id for member in members),
                dropped=dropped,
                tokens=done.report.tokens,
                step_seconds=seconds,
                blocked_seconds=blocked,
                waited_seconds=waited,
            )

        return finish

    def _place(self) -> _Place:
        now = time.monotonic()
        return _Place(self._step, self._receiver.state(), self._batcher.state(now=now))

    def _checkpoint(self) -> None:
        """Write the one that is due: masters, moments, version and read position, in one folder.
        Its version is durable and reported first: a resumed run must not lose the step's
        record."""
        due, self._due = self._due, None
        if due is None:
            return
        self._settle(block=True)
        newest = self._publisher.newest
        if newest is None or self._saved_step == due.step:
            return
        state = CheckpointState(
            run_id=self._run_id,
            step=due.step,
            version=newest.version,
            root=newest.root,
            receiver=due.receiver,
            batcher=due.batcher,
        )
        self._team.together(lambda: self._save(state))
        self._saved_step = due.step

    def _save(self, state: CheckpointState) -> None:
        self._checkpoints.save(state, self._policy.state())
