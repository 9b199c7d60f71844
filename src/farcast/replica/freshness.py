"""Is what the store calls newest the newest? Asked only with a pinned key, as in TUF.

A hostile store cannot make a version, but it can hold some back. So, with `seen` the newest
version that the target ever held:

 1. Rollback: a store whose newest version is older than `seen`, or another one under its number,
    is not believed.
 2. The publisher's signed timestamp names what was newest when it was issued. A store that cannot
    show that version holds it back.
 3. Freeze: a timestamp that has run out says nothing any more. A store that shows no better one
    may be showing an old world.

Time is this machine's own: a hostile store would lie about its own. A timestamp is read again only
when the one at hand has run out, so a steady follower makes no further request.

Refuses to judge versions that are asked for by name, and to stop what serves: the errors say that
a later look may go well.
"""

import logging
from collections.abc import Callable
from typing import Literal

from farcast.errors import FreezeError, RollbackError
from farcast.lineage import Manifest, Timestamp
from farcast.store.archive import Archive
from farcast.types import VersionRef

OnExpiry = Literal["refuse", "warn"]
"""What a timestamp that ran out leads to: nothing newer is taken, or a warning in the log."""

_LOG = logging.getLogger(__name__)


class Freshness:
    """Looks at what the store shows, for one subscriber."""

    def __init__(
        self, archive: Archive, *, on_expiry: OnExpiry, clock: Callable[[], float]
    ) -> None:
        self._archive = archive
        self._on_expiry = on_expiry
        self._clock = clock
        self._timestamp: Timestamp | None = None
        self.warning: str | None = None

    def check(self, newest: Manifest | None, seen: VersionRef | None) -> Manifest | None:
        """The newest version to go to. Raises `RollbackError` or `FreezeError`."""
        if self._archive.trusted is None:
            return newest
        if seen is not None:
            _refuse_older(_ref(newest), seen, "was verified here before")
        timestamp = self._current()
        if timestamp is None:
            return newest
        if newest is None or newest.version < timestamp.version:
            newest = self._archive.newest(relist=True)
        told = VersionRef(timestamp.run_id, timestamp.version, timestamp.root)
        # A timestamp names what the whole manifest does, whichever format is taken here.
        shown = None if newest is None else self._archive.whole_ref(newest)
        _refuse_older(shown, told, "is named by the signed timestamp")
        return newest

    def _current(self) -> Timestamp | None:
        """A timestamp that has not run out; None where that is only worth a warning."""
        held = self._timestamp
        if held is not None and self._clock() < held.expires:
            return held
        found = self._archive.timestamp()
        if found is not None and (held is None or found.issued >= held.issued):
            held = self._timestamp = found
        if held is not None and self._clock() < held.expires:
            self.warning = None
            return held
        message = _old_world(self._archive, held, self._clock())
        if self._on_expiry == "refuse":
            raise FreezeError(message)
        if self.warning is None:
            _LOG.warning("%s", message)
        self.warning = message
        return held


def _ref(manifest: Manifest | None) -> VersionRef | None:
    return None if manifest is None else manifest.ref


def _refuse_older(newest: VersionRef | None, known: VersionRef, why: str) -> None:
    if newest is None or newest.version < known.version:
        shown = "none" if newest is None else f"version {newest.version}"
        raise RollbackError(
            f"The store shows {shown} as the newest, but {known} {why}; it holds versions back, "
            "or was put back to an earlier state. What is served stays."
        )
    if newest.version == known.version and newest.root != known.root:
        raise RollbackError(
            f"The store shows {newest}, but {known} {why}; it was put back to an earlier "
            "state, or shows different readers different things. What is served stays."
        )


def _old_world(archive: Archive, timestamp: Timestamp | None, now: float) -> str:
    where = f"{archive.store.url} ({archive.run_id})"
    if timestamp is None:
        return (
            f"{where} holds no signed timestamp, so nothing says that its newest version is "
            "recent; let the trainer's publisher sign, or accept old worlds (--expired warn)."
        )
    return (
        f"The signed timestamp of {where} names version {timestamp.version} and ran out "
        f"{now - timestamp.expires:.0f} seconds ago: the trainer is gone, this machine's clock is "
        "ahead, or the store holds newer versions back. What is served stays."
    )
