"""A TRL run that is killed goes on where its last checkpoint stands: where reading was, and which
groups were read and not trained on, are kept in the checkpoint's folder.

    AsyncGRPOTrainer(..., rollout_worker=rollouts, callbacks=[RolloutsInCheckpoint(rollouts)])
    trainer.train(resume_from_checkpoint=newest_checkpoint(folder))

The file is written last, when all else in the folder is on disk: a folder without it was cut off
while it was written, and `newest_checkpoint` passes over it.

TRL does not say which samples a step was trained on, and takes those of the next batch before it
trains on one. So a group counts as trained on once all of it was taken before the step before
began, and not by its last sample alone, which a full batch leaves to the next. None is lost; those
of about one batch may be trained on again.
"""

import logging
from collections import deque
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from transformers import TrainerCallback

from farcast.errors import FormatError, RunMismatchError
from farcast.train.durable import sync_file, sync_folder, sync_tree
from farcast.trajectory import Group
from farcast.trajectory.encoding import decode_batch, pack, seal

FILE = "farcast_rollouts.msgpack"
MAX_STATE = 1 << 32
"""More than the groups of two batches take; what is larger is another file."""

_LOG = logging.getLogger(__name__)


class RolloutState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`groups` were read and not trained on, each as batches; they come before what is read."""

    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    run_id: str
    receiver: dict[str, Any]
    batcher: bytes
    groups: list[list[bytes]]


class Resumable(Protocol):
    """A rollout worker whose state can be kept."""

    @property
    def taken(self) -> int:
        """Samples that the trainer took so far."""
        ...

    def keep(self) -> None:
        """Hold on to groups until they are released."""
        ...

    def release(self, trained: int) -> None:
        """Let go of groups among the first `trained` samples."""
        ...

    def state(self) -> RolloutState:
        """Where reading stands, and the groups that were not released."""
        ...

    def restore(self, state: RolloutState) -> None:
        """Continue from there; before `start`."""
        ...


def packed(group: Group, run_id: str) -> list[bytes]:
    return [seal(p, number) for number, p in enumerate(pack(group.members, run_id=run_id))]


def unpacked(batches: list[bytes], run_id: str) -> Group:
    """Raises what `decode_batch` does, and `RunMismatchError`."""
    read = [decode_batch(data) for data in batches]
    members = tuple(member for batch in read for member in batch.trajectories)
    if any(batch.run_id != run_id for batch in read):
        raise RunMismatchError(f"The checkpoint's groups are not of run {run_id}; use its own.")
    if not members:
        raise FormatError("The checkpoint has a group without members; use another checkpoint.")
    return Group(members[0].group_id, members)


def newest_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint below an `output_dir`, as `resume_from_checkpoint` takes it; None
    where there is none, and the run begins."""
    numbers = [
        int(number)
        for path in folder.glob("checkpoint-*")
        if (number := path.name.removeprefix("checkpoint-")).isdecimal() and (path / FILE).is_file()
    ]
    return str(folder / f"checkpoint-{max(numbers)}") if numbers else None


class RolloutsInCheckpoint(TrainerCallback):  # type: ignore[misc]
    """`callbacks=`: keeps a rollout worker's state in each checkpoint, and takes it from the one
    that a run resumes from."""

    def __init__(self, rollouts: Resumable) -> None:
        self._rollouts = rollouts
        self._taken: deque[int] = deque([0], maxlen=2)
        """When the step before began, and when this one did."""
        rollouts.keep()

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Before TRL starts to read: its own callbacks come after those that it is given."""
        if not state.is_world_process_zero or state.global_step == 0:
            return
        path = _folder(args, state) / FILE
        if not path.is_file():
            _LOG.warning("%s has no %s: reading begins anew.", path.parent, FILE)
            return
        if path.stat().st_size > MAX_STATE:
            raise FormatError(f"{path} is too large to be what it should; use another checkpoint.")
        try:
            read = msgspec.msgpack.decode(path.read_bytes(), type=RolloutState)
        except msgspec.DecodeError as error:
            raise FormatError(f"{path} is not valid ({error}); use another checkpoint.") from error
        self._rollouts.restore(read)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._taken.append(self._rollouts.taken)
        self._rollouts.release(self._taken[0])

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = _folder(args, state)
        data = msgspec.msgpack.encode(self._rollouts.state())
        sync_tree(folder)
        new = folder / f"{FILE}.new"
        new.write_bytes(data)
        sync_file(new)
        new.replace(folder / FILE)
        sync_folder(folder)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
