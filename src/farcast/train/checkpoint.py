"""The trainer's checkpoints: one folder holds all that a resumed run needs, or it does not exist.

    step-000000000012/
        tensors.safetensors     masters and optimizer moments
        state.json              step, version, read position, digests

A folder is written under another name, made durable, and renamed: a crash or a full disk leaves
the previous one. The two newest are kept. Tensors are compared with their digest before use.
"""

import errno
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from blake3 import blake3

from farcast.errors import ConfigError, FormatError, IntegrityError, RunMismatchError
from farcast.train.durable import sync_folder, sync_tree
from farcast.types import Digest, Name

KEEP = 2
_TENSORS, _STATE = "tensors.safetensors", "state.json"
_FOLDER = re.compile(r"step-(\d{12})")
_PART = ".part"
_CHUNK = 1 << 24

Count = Annotated[int, msgspec.Meta(ge=0)]


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything but tensors. `version` is the newest that was published when this was written;
    `receiver` and `batcher` are the read position and what was read but not yet used."""

    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    run_id: Name
    step: Count
    version: Count
    root: Digest
    receiver: dict[str, Any]
    batcher: bytes


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: CheckpointState
    tensors_digest: Digest
    tensors_size: Count


class Checkpoints:
    """The checkpoints of one run in one folder. One process writes; ranks have one each."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id

    def save(self, state: CheckpointState, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write a checkpoint; durable on return. Raises `ConfigError` when the disk is full or
        cannot be written, and then the previous checkpoint stands."""
        final = self._folder / f"step-{state.step:012d}"
        part = final.with_name(final.name + _PART)
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            self._write(part, state, tensors)
            shutil.rmtree(final, ignore_errors=True)  # the same step again, after a resume
            part.rename(final)
            sync_folder(self._folder)
            self._prune()
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise ConfigError(
                f"The checkpoint of step {state.step} could not be written to {self._folder} "
                f"({'the disk is full' if full else error.strerror}); make room or permission "
                "there and resume: the checkpoint before it stands."
            ) from error
        return final

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint; None when there is none."""
        return max(self.steps(), default=None)

    def load(
        self, step: int | None = None
    ) -> tuple[CheckpointState, dict[str, torch.Tensor]] | None:
        """The checkpoint of `step`, or the newest, verified; None when there is none."""
        step = self.newest_step if step is None else step
        return None if step is None else self._read(self._folder / f"step-{step:012d}")

    def discard_after(self, step: int) -> None:
        """Remove checkpoints of later steps, which are not part of the run any more."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self._folder / f"step-{later:012d}")

    def _write(
        self, part: Path, state: CheckpointState, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = part / _TENSORS
        try:
            save_file({name: t.contiguous() for name, t in tensors.items()}, path)
        except SafetensorError as error:  # its I/O errors carry no errno
            full = "No space left" in str(error) or "os error 28" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, "writing tensors failed") from error
        stored = _Stored(
            state=state, tensors_digest=_digest(path), tensors_size=path.stat().st_size
        )
        (part / _STATE).write_bytes(msgspec.json.encode(stored))
        sync_tree(part)

    def _read(self, folder: Path) -> tuple[CheckpointState, dict[str, torch.Tensor]]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            stored = msgspec.json.decode((folder / _STATE).read_bytes(), type=_Stored)
            if stored.state.run_id != self._run_id:
                raise RunMismatchError(
                    f"The checkpoint in {folder} is of run {stored.state.run_id}, "
                    f"not {self._run_id}; name its own run or another folder."
                )
            path = folder / _TENSORS
            if path.stat().st_size != stored.tensors_size or _digest(path) != stored.tensors_digest:
                raise IntegrityError(
                    f"The checkpoint in {folder} is damaged; "
                    "remove it to resume from the one before."
                )
            return stored.state, load_file(path)
        except (msgspec.DecodeError, SafetensorError) as error:
            raise FormatError(
                f"The checkpoint in {folder} cannot be read ({type(error).__name__}); "
                "remove it to resume from the one before."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"The checkpoint in {folder} cannot be read ({error.strerror}); "
                "check the folder and its permissions."
            ) from error

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        if not self._folder.is_dir():
            return []
        names = (_FOLDER.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def _prune(self) -> None:
        for step in self.steps()[:-KEEP]:
            shutil.rmtree(self._folder / f"step-{step:012d}", ignore_errors=True)
        for leftover in self._folder.glob(f"step-*{_PART}"):
            shutil.rmtree(leftover, ignore_errors=True)


def _digest(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()
