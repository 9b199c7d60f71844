"""Manifests, run records and timestamps to bytes and back. Pure.

Encoding is canonical: equal values give equal bytes (fields in declared order, keys of
mappings sorted), so a publisher knows its own write by comparing bytes.

Decoding refuses, in this order, cheapest first:

 1. more bytes than `MAX_MANIFEST_BYTES` (before anything is parsed)
 2. what is not JSON of exactly these fields, types, patterns and bounds
 3. another run than the reader asked for (`RunMismatchError`)
 4. another version than the key says
 5. an anchor that does not agree with `anchor_version`; a version that nothing leads to
 6. a delta whose base is not older than the version (so that no path can have a cycle),
    or two deltas from one base
 7. an origin anywhere but in version 0, or in the run itself
 8. an object named twice in one list; a change without objects
 9. counts that contradict each other
10. one served format named twice; and each of several is checked by rules 5 to 9

Refuses to judge anything that needs a second manifest: that is `farcast.lineage.planning`.
"""

from typing import TypeVar

import msgspec
from msgspec import UNSET

from farcast.errors import FormatError, IntegrityError, LimitError, RunMismatchError
from farcast.lineage.manifest import (
    MAX_MANIFEST_BYTES,
    RUN_KEY,
    TIMESTAMP_KEY,
    Delta,
    Manifest,
    ObjectRef,
    RunRecord,
    Timestamp,
    version_key,
)

_T = TypeVar("_T", Manifest, RunRecord, Timestamp)

UNUSABLE = (FormatError, IntegrityError, RunMismatchError)
"""What a damaged, forged, unsigned or misplaced manifest raises."""

MAX_TIMESTAMP_BYTES = 4096
"""A name of 128 characters, a digest and a signature take less than 600."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON of a manifest that passes every check a reader will make."""
    check_manifest(manifest)
    return _encode(manifest, version_key(manifest.version))


def decode_manifest(data: bytes, *, run_id: str, version: int) -> Manifest:
    """Read the manifest found under the key of `version` in the store of `run_id`."""
    key = version_key(version)
    manifest = _decode(data, Manifest, key)
    if manifest.run_id != run_id:
        raise _other_run(key, manifest.run_id, run_id)
    if manifest.version != version:
        raise FormatError(
            f"{key} describes version {manifest.version}; "
            "the store gave one manifest under the name of another, do not use it."
        )
    check_manifest(manifest)
    return manifest


def encode_run_record(record: RunRecord) -> bytes:
    """Canonical JSON of a run record."""
    return _encode(record, RUN_KEY)


def decode_run_record(data: bytes, *, run_id: str | None = None) -> RunRecord:
    """Read `run.json`; with `run_id`, refuse the record of another run."""
    record = _decode(data, RunRecord, RUN_KEY)
    if run_id is not None and record.run_id != run_id:
        raise _other_run(RUN_KEY, record.run_id, run_id)
    return record


def encode_timestamp(timestamp: Timestamp) -> bytes:
    """Canonical JSON of a timestamp."""
    return _encode(timestamp, TIMESTAMP_KEY)


def decode_timestamp(data: bytes, *, run_id: str) -> Timestamp:
    """Read `timestamp.json` of the run `run_id`; its signature is the caller's to check."""
    timestamp = _decode(data, Timestamp, TIMESTAMP_KEY)
    if timestamp.run_id != run_id:
        raise _other_run(TIMESTAMP_KEY, timestamp.run_id, run_id)
    return timestamp


def check_manifest(manifest: Manifest) -> None:
    """Rules 5 to 10 of this module: what one manifest can show about itself."""
    if manifest.also is not UNSET:
        if manifest.served_format in manifest.also:
            raise _broken(manifest, "names one served format twice")
        for served_format in manifest.also:
            _check_view(manifest.view(served_format))
    _check_view(manifest)


def _check_view(manifest: Manifest) -> None:
    _check_anchor(manifest)
    origin = manifest.origin
    if origin is not UNSET and (manifest.version != 0 or origin.run_id == manifest.run_id):
        raise _broken(manifest, "names an origin, which only the first version of a fork has")
    bases = [delta.base for delta in manifest.deltas]
    if len(set(bases)) != len(bases):
        raise _broken(manifest, "names two deltas from one base")
    for delta in manifest.deltas:
        _check_delta(manifest, delta)
    _check_counts(manifest)


def _check_anchor(manifest: Manifest) -> None:
    if (manifest.anchor is not None) != (manifest.anchor_version == manifest.version):
        raise _broken(manifest, f"says its anchor is version {manifest.anchor_version}, wrongly")
    if manifest.anchor_version > manifest.version:
        raise _broken(manifest, "names an anchor newer than itself")
    if manifest.anchor is None and not manifest.deltas:
        raise _broken(manifest, "has neither an anchor nor a delta, so nothing leads to it")
    if manifest.anchor is not None:
        _check_objects(manifest, manifest.anchor)
        if not manifest.anchor and manifest.tensors:
            raise _broken(manifest, "has an anchor without objects")


def _check_delta(manifest: Manifest, delta: Delta) -> None:
    if delta.base >= manifest.version:
        raise _broken(manifest, f"has a delta from version {delta.base}, which is not older")
    if not delta.objects and delta.base_root != manifest.root:
        raise _broken(manifest, f"has a delta from version {delta.base} without objects")
    _check_objects(manifest, delta.objects)


def _check_objects(manifest: Manifest, objects: tuple[ObjectRef, ...]) -> None:
    if len({ref.digest for ref in objects}) != len(objects):
        raise _broken(manifest, "names one object twice in a list")


def _check_counts(manifest: Manifest) -> None:
    if manifest.changed > manifest.elements:
        raise _broken(manifest, "counts more changed elements than it has")
    if not manifest.tensors and (manifest.elements or manifest.bytes_full):
        raise _broken(manifest, "counts elements but no tensor")


def _encode(value: Manifest | RunRecord | Timestamp, key: str) -> bytes:
    data = msgspec.json.encode(value, order="deterministic")
    if len(data) > MAX_MANIFEST_BYTES:
        raise _too_long(key, len(data))
    return data


def _decode(data: bytes, kind: type[_T], key: str) -> _T:
    if len(data) > MAX_MANIFEST_BYTES:
        raise _too_long(key, len(data))
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec names the field's path and the rule, never the value.
        reason = error if isinstance(error, msgspec.ValidationError) else "it is not JSON"
        raise FormatError(
            f"{key} is not a valid {kind.__name__} ({reason}); "
            "check who writes to this store and the versions of farcast on both sides."
        ) from None


def _too_long(key: str, size: int) -> LimitError:
    return LimitError(
        f"{key} has {size} bytes where at most {MAX_MANIFEST_BYTES} are allowed; "
        "use fewer, larger objects, or check who wrote it."
    )


def _other_run(key: str, found: str, wanted: str) -> RunMismatchError:
    return RunMismatchError(
        f"{key} belongs to the run {found!r}, not to {wanted!r}; "
        "name that run, or use another store prefix."
    )


def _broken(manifest: Manifest, what: str) -> FormatError:
    return FormatError(f"{version_key(manifest.version)} {what}; do not use it.")
