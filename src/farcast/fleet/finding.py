"""Finds the run that a store holds, for whoever knows only the store's URL."""

from collections.abc import Iterator

from farcast.errors import ObjectNotFoundError, RunMismatchError, UnknownVersionError
from farcast.lineage import (
    MAX_MANIFEST_BYTES,
    RUN_KEY,
    VERSIONS_PREFIX,
    Manifest,
    RunRecord,
    TrustedKey,
    decode_run_record,
    parse_version_key,
)
from farcast.store import Store
from farcast.store.archive import Archive


def run_in(store: Store) -> RunRecord | None:
    """The record of the run in this store, None when no run was started here yet."""
    try:
        data = store.get(RUN_KEY, max_bytes=MAX_MANIFEST_BYTES)
    except ObjectNotFoundError:
        return None
    return decode_run_record(data)


def open_archive(
    store: Store, trusted: TrustedKey | None = None, served_format: str | None = None
) -> Archive:
    """The run in this store, or a sentence that says where to look for one. With `trusted`, its
    record must be signed by that key; with `served_format`, it is seen in that format alone."""
    record = run_in(store)
    if record is None:
        raise ObjectNotFoundError(
            f"There is no run in {store.url}; check the URL, or start one with `farcast train`."
        )
    if trusted is not None:
        trusted.check(record, RUN_KEY)
    return Archive(store, record.run_id, trusted=trusted, served_format=served_format)


def require_unused(store: Store) -> None:
    """Refuse a store that holds a run, before anything of a new one is written anywhere."""
    record = run_in(store)
    if record is not None:
        raise RunMismatchError(
            f"{store.url} already holds the run {record.run_id}; continue that one with --resume "
            "where it was started, or use another store prefix."
        )


def versions_in(store: Store) -> Iterator[int]:
    """Every version that was published and not removed, in order."""
    for info in store.list(VERSIONS_PREFIX):
        version = parse_version_key(info.key)
        if version is not None:
            yield version


def newest_manifest(archive: Archive) -> Manifest:
    """The newest version, or a sentence that there is none yet."""
    manifest = archive.newest()
    if manifest is None:
        raise UnknownVersionError(
            f"Run {archive.run_id} has no version yet; wait until its trainer has published one."
        )
    return manifest
