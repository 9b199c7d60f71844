"""The training loop, read from top to bottom in `Trainer.run`.

    wait for whole, fresh groups -> loss, gradients -> AdamW on the masters -> publish -> report

Sampling never stops for it: workers go on with the version they have, each token's log-prob says
under what it was sampled, and the loss corrects for it. Publishing overlaps the next step; what
the loop had to wait for it is measured.

Knows nothing of processes, records or screens: a reporter is passed in.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from farcast.config import TrainConfig
from farcast.publish import Publisher, PublishJob, PublishReport
from farcast.train.checkpoint import Checkpoints, CheckpointState
from farcast.train.objectives import LossOutputs, group_advantages, policy_loss
from farcast.train.packing import pack_group
from farcast.train.policy import Policy, served_root
from farcast.trajectory import Group, GroupBatcher, TrajectoryReceiver, staleness_of
from farcast.trajectory.batching import RootOf

POLL_SECONDS = 0.1
READ_AHEAD_GROUPS = 4
"""Groups read beyond those of one step: more would only wait here instead of in the store."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step and the version it became. `root` is of the trainer's own tensors."""

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
    loss: float
    kl: float
    clipped: float
    tokens: int
    grad_norm: float


class _Pending(NamedTuple):
    """A version on its way, and the report that waits for its name."""

    job: PublishJob
    report: Callable[[PublishReport], StepReport]


class Trainer:
    """Trains `policy` on what `receiver` brings, and publishes each step.

    `root_of` knows what was published, so that a span's claim can be checked. `report` is called
    once a step, in order, as soon as its version is durable; `idle` while the loop waits for
    trajectories. `stop` is asked between steps.
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
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._policy = policy
        self._config = config
        self._run_id = run_id
        self._publisher = publisher
        self._receiver = receiver
        self._batcher = batcher
        self._checkpoints = checkpoints
        self._root_of = root_of
        self._report = report
        self._idle = idle
        self._stop = stop
        self._step = 0
        self._saved_step = -1
        self._pending: _Pending | None = None
        self._blocked = 0.0
        self._waited = 0.0

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._step

    @property
    def version(self) -> int:
        """The version of the weights that the next step starts from."""
        newest = self._publisher.newest
        return (-1 if newest is None else newest.version) + (self._pending is not None)

    def resume(self) -> bool:
        """Continue from the newest checkpoint; False when there is none."""
        found = self._checkpoints.load()
        if found is None:
            return False
        state, tensors = found
        self._policy.restore(tensors)
        self._receiver.restore(state.receiver)
        self._batcher.restore(state.batcher, now=time.monotonic())
        self._step = self._saved_step = state.step
        return True

    def run(self) -> None:
        """Train until `config.steps` steps are taken or `stop` says so; checkpointed on return.

        The weights before the first step are version 0, so that workers can begin."""
        if self._publisher.newest is None:
            self._publisher.publish(self._policy.served(), self._step)
        while self._step < self._config.steps:
            groups = self._wait_for_groups()
            if groups is None:
                break
            began = time.perf_counter()
            update = self._update(groups)
            self._publish(update, began)
            if self._step % self._config.checkpoint_every == 0:
                self._checkpoint()
        self._checkpoint()

    def _wait_for_groups(self) -> list[Group] | None:
        """Whole groups, fresh enough now; None once asked to stop."""
        began = time.perf_counter()
        want = self._config.groups_per_step
        while not self._stop():
            room = want + READ_AHEAD_GROUPS - self._batcher.whole_groups()
            if room > 0:
                read = self._receiver.consume(room * self._config.group_size)
                self._batcher.add(read, now=time.monotonic())
            groups = self._batcher.take(
                want, version=self.version, now=time.monotonic(), root_of=self._root_of
            )
            if groups:
                self._waited += time.perf_counter() - began
                return groups
            self._settle(block=False)
            self._idle()
            time.sleep(POLL_SECONDS)
        return None

    def _update(self, groups: Sequence[Group]) -> _Update:
        """One optimizer step on whole groups; each token weighs the same."""
        version = self.version
        total = sum(sum(m.loss_mask) for group in groups for m in group.members)
        outputs: list[LossOutputs] = []
        for group in groups:
            rewards = torch.tensor([member.reward for member in group.members])
            if bool((rewards == rewards[0]).all()):
                continue  # no member is better than another: all advantages are zero
            for pack in pack_group(group.members, group_advantages(rewards).tolist()):
                out = policy_loss(
                    self._policy.logprobs(pack),
                    pack.behaviour,
                    pack.advantages,
                    clip_low=self._config.clip_low,
                    clip_high=self._config.clip_high,
                    is_cap=self._config.is_cap,
                )
                (out.loss / max(total, 1)).backward()
                outputs.append(out)
        self._step += 1
        grad_norm = self._policy.step(self._step)
        tokens = max(sum(out.tokens for out in outputs), 1)
        return _Update(
            groups=groups,
            version=version,
            loss=sum(float(out.loss.detach()) for out in outputs) / max(total, 1),
            kl=sum(out.kl for out in outputs) / tokens,
            clipped=sum(out.clipped for out in outputs) / tokens,
            tokens=total,
            grad_norm=grad_norm,
        )

    def _publish(self, update: _Update, began: float) -> None:
        """Hand the new weights to the publisher; it is durable when the next step is."""
        self._settle(block=True)
        served = self._policy.served()
        root = served_root(served)
        before = time.perf_counter()
        job = self._publisher.publish_async(served, self._step)
        self._blocked += time.perf_counter() - before
        seconds = time.perf_counter() - began
        report = self._reporter(update, root, seconds, self._batcher.drain_dropped())
        self._pending = _Pending(job, report)

    def _settle(self, *, block: bool) -> None:
        """Report the version on its way once it is durable. An error of publishing surfaces here:
        the run stops at its last checkpoint rather than train on what nobody can serve."""
        if self._pending is None or not (block or self._pending.job.done()):
            return
        before = time.perf_counter()
        published = self._pending.job.report()
        self._blocked += time.perf_counter() - before
        report = self._pending.report(published)
        self._pending = None
        self._report(report)

    def _reporter(
        self,
        update: _Update,
        root: str,
        seconds: float,
        dropped: dict[str, tuple[str, ...]],
    ) -> Callable[[PublishReport], StepReport]:
        members = [member for group in update.groups for member in group.members]
        rewards = torch.tensor([member.reward for member in members])
        ages = [staleness_of(member, update.version) for member in members]
        step, waited = self._step, self._waited
        self._waited = 0.0

        def finish(published: PublishReport) -> StepReport:
            blocked, self._blocked = self._blocked, 0.0
            return StepReport(
                published=published,
                root=root,
                step=step,
                reward_mean=float(rewards.mean()),
                reward_std=float(rewards.std()),
                loss=update.loss,
                grad_norm=update.grad_norm,
                kl=update.kl,
                clipped=update.clipped,
                staleness_mean=sum(ages) / len(ages),
                staleness_max=max(ages),
                consumed=tuple(member.id for member in members),
                dropped=dropped,
                tokens=update.tokens,
                step_seconds=seconds,
                blocked_seconds=blocked,
                waited_seconds=waited,
            )

        return finish

    def _checkpoint(self) -> None:
        """Masters, moments, version and read position, in one folder. The version of this step is
        durable and reported first: a resumed run must not lose the step's record."""
        self._settle(block=True)
        newest = self._publisher.newest
        if newest is None or self._saved_step == self._step:
            return
        state = CheckpointState(
            run_id=self._run_id,
            step=self._step,
            version=newest.version,
            root=newest.root,
            receiver=self._receiver.state(),
            batcher=self._batcher.state(now=time.monotonic()),
        )
        self._checkpoints.save(state, self._policy.state())
        self._saved_step = self._step
