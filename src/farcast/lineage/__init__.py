"""What versions there are and how to get from one to another: manifests and plans. Pure."""

from farcast.lineage.encoding import (
    check_manifest,
    decode_manifest,
    decode_run_record,
    encode_manifest,
    encode_run_record,
)
from farcast.lineage.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_OBJECT_BYTES,
    MAX_OBJECTS,
    OBJECTS_PREFIX,
    RUN_KEY,
    VERSIONS_PREFIX,
    Delta,
    Manifest,
    ObjectRef,
    RunRecord,
    object_key,
    parse_version_key,
    version_key,
)
from farcast.lineage.planning import MAX_MANIFESTS_READ, Plan, PlanStep, plan
from farcast.lineage.retention import first_kept
from farcast.lineage.schedule import (
    MAX_ANCHOR_DISTANCE,
    MAX_SQUASHED,
    check_anchor_every,
    check_squash,
    is_anchor_due,
    squash_spans,
)

__all__ = [
    "MAX_ANCHOR_DISTANCE",
    "MAX_MANIFESTS_READ",
    "MAX_MANIFEST_BYTES",
    "MAX_OBJECTS",
    "MAX_OBJECT_BYTES",
    "MAX_SQUASHED",
    "OBJECTS_PREFIX",
    "RUN_KEY",
    "VERSIONS_PREFIX",
    "Delta",
    "Manifest",
    "ObjectRef",
    "Plan",
    "PlanStep",
    "RunRecord",
    "check_anchor_every",
    "check_manifest",
    "check_squash",
    "decode_manifest",
    "decode_run_record",
    "encode_manifest",
    "encode_run_record",
    "first_kept",
    "is_anchor_due",
    "object_key",
    "parse_version_key",
    "plan",
    "squash_spans",
    "version_key",
]
