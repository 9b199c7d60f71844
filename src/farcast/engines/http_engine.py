"""What a sidecar asks of an engine that runs as a server of its own.

Two kinds, and a target for each (`Subscriber` and `Follower` drive those as any other target):

    InPlaceEngine    words are staged beside the live weights and written in a short pause;
                     `farcast.engines.live_engine.EngineTarget`
    ReloadingEngine  reads a checkpoint folder again;
                     `farcast.engines.folder_engine.EngineFolder`

All calls block and go over the engine's own routes. They raise `EngineUnreachableError` if the
engine did not answer and `EngineRefusedError` if it answered no: both say nothing about the
weights, which the caller finds out by asking for them.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from farcast.engines.blocks import Block
from farcast.errors import EngineError, TargetUncertainError
from farcast.replica import Place
from farcast.types import TensorEntry, VersionRef

UNKNOWN = ""
"""The label of weights that no version was put into yet."""


def label_of(ref: VersionRef | None) -> str:
    """How an engine is told which version it holds: short, and different for every root."""
    return UNKNOWN if ref is None else f"{ref.run_id}@{ref.version}:{ref.root}"


class MemberLayout(msgspec.Struct, frozen=True):
    """Where one member of the engine (a tensor or pipeline parallel rank) holds the tensors.

    `blocks` has the tensors of which it holds a part, as places in its memory; `opaque` those
    that it holds in another form, with the reason; `skipped` those its loader passes over.
    """

    member: int
    blocks: dict[str, tuple[Block, ...]]
    opaque: dict[str, str] = {}
    skipped: tuple[str, ...] = ()


class Receipt(msgspec.Struct, frozen=True):
    """What one member holds. `digests` are of its part of a tensor, one for each block."""

    member: int
    label: str
    digests: dict[str, tuple[str, ...]] = {}


class Whole(msgspec.Struct, frozen=True):
    """Tensors that are loaded whole: those that an engine holds in a form without a map, and what
    shares a layer with them. `file` has them in the layout of a `Mirror`, `before` is the mirror
    with the present ones; `entries` and `entries_before` are what both have to be."""

    file: str
    before: str
    entries: dict[str, TensorEntry]
    entries_before: dict[str, TensorEntry]


class HttpEngine(Protocol):
    """What both kinds do."""

    name: str
    """For people and logs: "vllm", "sglang"."""

    guarded_routes: tuple[str, ...]
    """Path prefixes that change weights or run code. Nobody but the sidecar may reach them."""

    salt_field: str
    """The field of a request's body that keeps cached prefixes of different salts apart."""

    def check_health(self) -> None:
        """Return if the engine is up and can serve."""
        ...

    def pause(self) -> None:
        """Stop between two token steps; requests in flight wait. Safe to repeat."""
        ...

    def resume(self) -> None:
        """Go on. Safe to repeat."""
        ...

    def drop_caches(self) -> bool:
        """Put cached prefixes out of reach; True only if the engine confirmed it."""
        ...

    def label(self) -> str:
        """The label that the engine itself gives to what it generates now."""
        ...

    def salt(self, ref: VersionRef) -> Mapping[str, Any]:
        """What a request's body has to carry so that it meets no prefix of another version."""
        ...


class InPlaceEngine(HttpEngine, Protocol):
    """Several members act as one: a call that returns has been confirmed by every member, and a
    call that raises may have reached some of them."""

    def attach(self, places: Mapping[str, Place]) -> Sequence[MemberLayout]:
        """Find out where checkpoint tensors lie in each member's memory. Changes nothing."""
        ...

    def stage(self, words: Path, digest: str, label: str, whole: Whole | None = None) -> None:
        """Prepare the words of a file (`farcast.engines.words_file`) beside the live weights, and
        tensors to load whole; returns once every member could commit at once. Raises
        `TargetChangedError` if a member does not hold the old words."""
        ...

    def open_update(self) -> None:
        """Get ready for `write`, before the pause. Safe to repeat."""
        ...

    def close_update(self) -> None:
        """The end of what `open_update` began, after the pause. Safe to repeat."""
        ...

    def write(self, label: str) -> None:
        """Write what was staged if the live words are still those it starts from, and read it
        back. Only while paused. Raises `TargetChangedError` if they are not."""
        ...

    def undo(self, label: str) -> None:
        """Write the old words again, in every member that had begun to write `label`."""
        ...

    def name_weights(self, label: str) -> None:
        """Let what is generated from now on be labelled so. The last step before `resume`."""
        ...

    def drop(self, label: str) -> None:
        """Free what was kept for `label`. Safe to repeat."""
        ...

    def receipts(self, names: Sequence[str] = ()) -> Sequence[Receipt]:
        """What each member holds now, with digests of the live words of `names`."""
        ...


class ReloadingEngine(HttpEngine, Protocol):
    """An engine that takes new weights as a folder."""

    def reload(self, folder: Path, label: str) -> None:
        """Load the folder's weights over the present ones. Only while paused."""
        ...

    def sample(self, name: str, length: int) -> Sequence[float] | None:
        """The first values of a live tensor, row by row; None if the engine can't tell."""
        ...


def pause(engine: HttpEngine) -> None:
    """Pause for a commit, or leave the engine running and raise."""
    try:
        engine.pause()
    except EngineError:
        with contextlib.suppress(EngineError):  # it may have paused without saying so
            engine.resume()
        raise


def resume(engine: HttpEngine) -> None:
    """Go on after a commit. An engine that does not is uncertain, whatever it holds."""
    try:
        engine.resume()
    except EngineError as error:
        raise TargetUncertainError(
            "The engine did not go on after a commit; replace it, or restart this replica."
        ) from error
