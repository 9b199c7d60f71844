"""`CheckpointDirectory`: a version as a folder that any engine can load.

How a switch survives a crash at any instruction:

 1. New files are written in `.farcast/staging`, synced, and read back against their digests.
 2. `.farcast/state.json` says which version is about to be there (`pending`) and which files
    will then be left over. Synced.
 3. New shards get their final, never used names in the folder. Synced. Nobody reads them yet.
 4. One rename replaces the pointer (`model.safetensors` or the index): the commit point. Synced.
 5. The state says that it is done; files of the old version are removed.

After a crash the folder holds the old version (before 4) or the new one. Which one is found by
hashing what is there, not by believing the state, which only offers versions to compare with.
Whatever a crash left behind is removed by the next `begin`.

Other files in the folder are not touched, and a symbolic link is replaced, never written
through. One process at a time updates a folder; readers need no lock.
"""

import logging
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from farcast.delta import TensorBits, entry_of, nbytes_of, root_of
from farcast.errors import TargetChangedError, TargetError
from farcast.replica import files
from farcast.replica.base import Check, Draft, Goal, Target
from farcast.replica.directory_draft import DirectoryDraft
from farcast.replica.layout import Layout, read_layout
from farcast.replica.shards import check_writable
from farcast.replica.workplace import State, Workplace
from farcast.types import TensorEntry, VersionRef

MAX_SHARD_BYTES = 5 << 30
"""What Hugging Face's tools split at; only used where a folder starts empty."""


_log = logging.getLogger(__name__)


class CheckpointDirectory(Target):
    """The model in `path`, which is made if it isn't there. The folder's layout is kept.

    A folder that already holds the weights of a version is recognised by hashing it, so that
    only the delta is fetched.
    """

    gives_copies = True

    def __init__(
        self,
        path: str | Path,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        check: Check = "changed",
    ) -> None:
        super().__init__(check=check)
        self._folder = Path(path).absolute()
        self._max_shard_bytes = max_shard_bytes
        self._work = Workplace(self._folder)
        self._layout: Layout | None = None
        self._scanned: Mapping[str, TensorEntry] = {}

    @property
    def path(self) -> Path:
        return self._folder

    @property
    def ref(self) -> VersionRef | None:
        with self._lock:
            self._require_certain()
            if self._layout is None:
                self._load()
            return self._ref

    @property
    def newest(self) -> VersionRef | None:
        with self._lock:
            if self._newest is None:
                with files.translated(self._folder):
                    state = self._work.read_state()
                self._newest = None if state is None else state.newest or state.current
            return self._newest

    @property
    def run_id(self) -> str | None:
        with files.translated(self._folder):
            state = self._work.read_state()
        return None if state is None else state.run_id

    def read(self, name: str) -> TensorBits:
        layout = self._layout
        if layout is None or name not in layout.where:
            raise TargetError(f"{self._folder} holds no tensor {name[:80]!r}; sync it first.")
        with files.translated(self._folder):
            return layout.shards[layout.where[name]].read(name)

    def holdings(self) -> Iterator[Mapping[str, TensorEntry]]:
        if self._layout is None:
            self._load()
        if self._scanned:
            yield self._scanned

    def forget(self) -> None:
        with self._lock:
            super().forget()
            self._layout, self._scanned = None, {}

    def verify(self) -> str:
        with self._lock:
            self._require_unmoved()
            return super().verify()

    # --- holes -------------------------------------------------------------------------------

    def _begin(self, goal: Goal) -> Draft:
        check_writable(goal.entries)
        with files.translated(self._folder):
            if goal.base is not None:
                self._require_unmoved()
            layout = self._layout = read_layout(self._folder)
            return DirectoryDraft(
                goal,
                layout,
                self._work,
                groups=grouped(goal.entries, layout, self._max_shard_bytes),
                rehash=self._check == "all",
                newest=self.newest,
            )

    def _settle_on(self, ref: VersionRef, entries: Mapping[str, TensorEntry]) -> None:
        with files.translated(self._folder):
            layout = read_layout(self._folder)
        super()._settle_on(ref, entries)
        self._layout, self._scanned = layout, {}

    # --- inside ------------------------------------------------------------------------------

    def _load(self) -> None:
        """Read and hash the folder, and see whether it is one of the versions it may be."""
        with files.translated(self._folder):
            state = self._work.read_state()
            layout = read_layout(self._folder)
            scanned = {
                name: entry_of(layout.shards[file].read(name))
                for name, file in layout.where.items()
            }
            interrupted = self._work.interrupted()
        self._layout, self._scanned = layout, scanned
        if state is not None:
            self._newest = self._newest or state.newest or state.current
        claims = () if state is None else (state.pending, state.current)
        root = root_of(scanned) if scanned else None
        claim = next((ref for ref in claims if ref is not None and ref.root == root), None)
        if claim is not None:
            super()._settle_on(claim, scanned)
        if interrupted:
            told = None if state is None else replace(state, current=claim, newest=self._newest)
            self._recover(layout, told)

    def _recover(self, layout: Layout, state: State | None) -> None:
        """Remove what a dead process left; leave it if the process lives or nothing may be
        written here, since the leftovers harm nobody."""
        try:
            lock = self._work.enter()
            try:
                self._work.clean(used=layout.shards.keys())
                if state is not None:
                    self._work.write_state(replace(state, pending=None, obsolete=()))
            finally:
                files.close(lock)
        except (OSError, TargetError) as error:
            _log.warning("Leftovers of an update stay in %s: %s", self._folder, error)

    def _require_unmoved(self) -> None:
        moved = None if self._layout is None else self._layout.moved()
        if moved is not None:
            self.forget()
            raise TargetChangedError(
                f"Somebody else replaced {self._folder / moved}; sync again to start from what "
                "is there now."
            )


def grouped(
    entries: Mapping[str, TensorEntry], layout: Layout, max_bytes: int
) -> dict[str, list[str]]:
    """Which tensors share a file: as in `layout`, with new ones where there is room.

    The keys are the present file names, or new ones that only tell the groups apart.
    """
    groups: dict[str, list[str]] = {name: [] for name in layout.shards}
    sizes = dict.fromkeys(groups, 0)
    last = next(reversed(groups), "")
    for name in sorted(entries, key=lambda name: (name not in layout.where, name)):
        size = nbytes_of(entries[name].dtype, entries[name].shape)
        group = layout.where.get(name, last)
        full = name not in layout.where and sizes.get(group, 0) + size > max_bytes
        if not group or (full and not layout.is_single and sizes[group]):
            group = last = secrets.token_hex(8)
        groups.setdefault(group, []).append(name)
        sizes[group] = sizes.get(group, 0) + size
    return {group: names for group, names in groups.items() if names} or {"": []}
