"""The manifest: the checked description of one version. Pure: bytes in, values out.

Producer: the publisher. Consumers: subscribers, `farcast verify | inspect | plan`.
A manifest is immutable; putting it (create-if-absent) is the commit point of a version,
and everything it names is durable before that. Refuses unknown formats, names that do not
match its key, and counts beyond the bounds below.

Keys, all below the store's prefix (one prefix holds one run):

    run.json                         RunRecord, put once
    timestamp.json                   Timestamp, rewritten by a publisher that signs
    versions/000000000012.json       Manifest of version 12, put once
    objects/<blake3 hex>             delta containers and assets, put once
    trajectories/<worker>/<seq>      batches of trajectories, put once
    workers/<worker>                 put once by a worker before its first batch
    fleet/...                        records that are rewritten: who is alive, what the trainer read
"""

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from farcast.errors import UnknownVersionError
from farcast.types import MAX_VERSION, Digest, Name, VersionRef

MANIFEST_FORMAT = 1

MAX_MANIFEST_BYTES = 1 << 20
"""A manifest names objects, not tensors: 1 MiB holds about 9,000 references."""

MAX_OBJECTS = 4096
"""Objects of one delta or anchor; at the 4 GiB an object may have this is 16 TiB."""

MAX_OBJECT_BYTES = 1 << 32

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""JSON has integers of any length; what does not fit in 64 bits is no count."""

Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


Signature = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
"""Ed25519, as lower-case hex digits; what it covers stands in `farcast.lineage.signing`."""

UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ObjectRef(_Wire, frozen=True, kw_only=True):
    """An object under `objects/<digest>`: BLAKE3 of its bytes, and its size in bytes."""

    digest: Digest
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_OBJECT_BYTES)]


Objects = Annotated[tuple[ObjectRef, ...], msgspec.Meta(max_length=MAX_OBJECTS)]


class Delta(_Wire, frozen=True, kw_only=True):
    """The change from version `base` (whose root is `base_root`) to the manifest's version."""

    base: Version
    base_root: Digest
    objects: Objects


MAX_OTHER_FORMATS = 15
"""Each is published in full at every anchor; nobody serves sixteen."""


class ServedVersion(_Wire, frozen=True, kw_only=True):
    """The same version in another served format: fields as in `Manifest`."""

    root: Digest
    precision_rule: Name | UnsetType = UNSET
    tensors: Count
    elements: Count
    bytes_full: Count
    changed: Count
    anchor_version: Version
    anchor: Objects | None = None
    deltas: Annotated[tuple[Delta, ...], msgspec.Meta(max_length=64)] = ()


class Manifest(_Wire, frozen=True, kw_only=True):
    """One version. `anchor` is None unless this version was also published in full;
    `anchor_version` is the newest version at or below this one that was.

    A version may be served in several formats, which are committed together: the first stands in
    the manifest itself, the others under `also`, and `view` shows one of them alone.
    """

    format: Annotated[int, msgspec.Meta(ge=MANIFEST_FORMAT, le=MANIFEST_FORMAT)] = MANIFEST_FORMAT
    run_id: Name
    version: Version
    root: Digest
    step: Count
    """Optimizer steps taken when these weights were derived."""
    served_format: Name
    tensors: Count
    elements: Count
    bytes_full: Count
    """Raw bytes of all served tensors: what a full copy would move."""
    changed: Count
    """Elements whose bits differ from the parent version."""
    anchor_version: Version
    anchor: Objects | None = None
    deltas: Annotated[tuple[Delta, ...], msgspec.Meta(max_length=64)] = ()
    writer: Name
    """Who wrote it: one id per publisher process, so that a writer knows its own write."""
    origin: VersionRef | UnsetType = UNSET
    """In the first version of a fork: the version of another run that it began as."""
    issued: UnixSeconds | UnsetType = UNSET
    """When it was signed, by the publisher's clock."""
    signature: Signature | UnsetType = UNSET
    precision_rule: Name | UnsetType = UNSET
    """Which tensors of a quantised format stay in high precision: `farcast.formats.RULES`."""
    also: (
        Annotated[
            dict[Name, ServedVersion], msgspec.Meta(min_length=1, max_length=MAX_OTHER_FORMATS)
        ]
        | UnsetType
    ) = UNSET
    """The other served formats of this version, by name."""

    @property
    def ref(self) -> VersionRef:
        return VersionRef(self.run_id, self.version, self.root)

    @property
    def objects(self) -> tuple[ObjectRef, ...]:
        """Every object this manifest names, each once: the anchor's, then the deltas', of every
        served format."""
        lists = [
            objects
            for view in self.views
            for objects in (view.anchor or (), *(delta.objects for delta in view.deltas))
        ]
        return tuple({ref.digest: ref for objects in lists for ref in objects}.values())

    @property
    def served_formats(self) -> tuple[str, ...]:
        """The formats this version is served in, the first one first."""
        return (self.served_format, *(() if self.also is UNSET else sorted(self.also)))

    @property
    def views(self) -> tuple["Manifest", ...]:
        """This version in each of its formats."""
        return tuple(map(self.view, self.served_formats))

    def view(self, served_format: str) -> "Manifest":
        """The version in one format, as if it were served in no other; not what was signed.

        Raises `UnknownVersionError` when it is not served in that format.
        """
        if served_format == self.served_format:
            return self if self.also is UNSET else replace(self, also=UNSET, signature=UNSET)
        if self.also is UNSET or served_format not in self.also:
            raise UnknownVersionError(
                f"Version {self.version} of {self.run_id!r} is not served as "
                f"{served_format[:60]!r}; take one of {', '.join(self.served_formats)}."
            )
        other = self.also[served_format]
        fields = {name: getattr(other, name) for name in other.__struct_fields__}
        bare = {"served_format": served_format, "also": UNSET, "signature": UNSET}
        return replace(self, **fields, **bare)


def joined(views: Sequence[Manifest]) -> Manifest:
    """One manifest for the same version in several formats; the first is the manifest itself."""
    first, *others = views
    if not others:
        return first
    also = {
        view.served_format: ServedVersion(
            **{name: getattr(view, name) for name in ServedVersion.__struct_fields__}
        )
        for view in others
    }
    return replace(first, also=also)


class RunRecord(_Wire, frozen=True, kw_only=True):
    """What a store holds, written once when the run starts.

    `assets` are the small files a replica needs to build the model and tokenizer
    (config.json, tokenizer.json, ...), by file name; `settings` is the trainer's RunConfig
    as JSON text, from which workers read the task and the sampling distribution.
    """

    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    run_id: Name
    created: str
    assets: Annotated[dict[Name, ObjectRef], msgspec.Meta(max_length=64)] = {}
    settings: Annotated[str, msgspec.Meta(max_length=1 << 18)] = ""
    signature: Signature | UnsetType = UNSET


class Timestamp(_Wire, frozen=True, kw_only=True):
    """A publisher's signed word that, when it was `issued`, `version` was the newest. Who sees it
    after `expires` cannot know whether the store holds something back. Both by the publisher's
    clock; rewritten long before it runs out."""

    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    run_id: Name
    version: Version
    root: Digest
    issued: UnixSeconds
    expires: UnixSeconds
    signature: Signature | UnsetType = UNSET


RUN_KEY = "run.json"
TIMESTAMP_KEY = "timestamp.json"
VERSIONS_PREFIX = "versions/"
OBJECTS_PREFIX = "objects/"
_VERSION_KEY = re.compile(r"versions/(\d{12})\.json")


def version_key(version: int) -> str:
    """`versions/000000000012.json`"""
    return f"{VERSIONS_PREFIX}{version:012d}.json"


def parse_version_key(key: str) -> int | None:
    """The version a key is for; None for a key that is not a manifest's."""
    found = _VERSION_KEY.fullmatch(key)
    return int(found[1]) if found else None


def object_key(ref: ObjectRef) -> str:
    """`objects/<digest>`; the digest's pattern was checked when the reference was read."""
    return f"{OBJECTS_PREFIX}{ref.digest}"
