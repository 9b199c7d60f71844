"""The cheapest way from what a replica has to the version it wants: in bytes, or in seconds over
a link whose figures are given. Pure.

The graph: an edge from `base` to `v` for each delta in the manifest of `v`, and an edge from
nothing to `v` where `v` was published in full. `plan` is Dijkstra's algorithm run backwards
from the wanted version, so it looks only at manifests that a cheaper path could go through:
with `have = want - 1` that is one.

Worked example: have 3, want 5, anchor of 5 is 100 bytes, deltas 4->5 is 6, 3->4 is 7,
squash 3->5 is 9. Backwards from 5: nothing at 100, 4 at 6, 3 at 9. Next is 4: 3 at 13, not
better. Next is 3, which we have: one step of 9 bytes.

What a hostile store can do to it, and what stops that:

 1. cycles: every delta's base is older than its version (`decode_manifest`)
 2. a path through another content: the root a delta names for its base must be the root in the
    base's own manifest, and that of `have` must be what the replica verified
 3. an endless chain of free steps: at most `MAX_MANIFESTS_READ` manifests are looked at
 4. an anchor that goes backwards: `anchor_version` never falls from base to version
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec

from farcast.errors import FormatError, LimitError, UnknownVersionError
from farcast.lineage.manifest import Manifest, ObjectRef
from farcast.types import Digest, VersionRef

MAX_MANIFESTS_READ = 4096
"""Manifests one plan may look at; two anchors are at most half of this apart."""

_NOTHING = -1
"""The node a replica without any version stands on."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """A link: `rate` in bytes per second, `rtt` in seconds for a round trip, and how many objects
    are asked for at once. A fetch is taken to last bytes / rate + objects * rtt / in_flight, and
    one round trip more: what a reader that keeps its requests in flight can hope for."""

    rate: Annotated[float, msgspec.Meta(gt=0)]
    rtt: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    in_flight: Annotated[int, msgspec.Meta(ge=1)] = 4

    def seconds(self, size: int, objects: int) -> float:
        """For `objects` of `size` bytes together, after the first round trip."""
        return size / self.rate + objects * self.rtt / self.in_flight


class PlanStep(msgspec.Struct, frozen=True, kw_only=True):
    """Fetch `objects`, and have `version` (with `root`). `base` is None for an anchor, which
    needs nothing; a delta needs exactly the bits of version `base`."""

    kind: Literal["anchor", "delta"]
    base: int | None
    version: int
    root: Digest
    objects: tuple[ObjectRef, ...]

    @property
    def bytes(self) -> int:
        return sum(ref.size for ref in self.objects)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in the order to apply them; none when `have` is already `want`.

    `bytes_full` is what a raw copy of `want` would move. `costs` is what decided; None: bytes.
    Printing a plan gives a table.
    """

    have: VersionRef | None
    want: VersionRef
    steps: tuple[PlanStep, ...]
    bytes_full: int
    costs: Costs | None = None

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float | None:
        """What fetching takes over the link of `costs`."""
        if self.costs is None:
            return None
        first = self.costs.rtt if self.objects else 0.0
        return first + self.costs.seconds(self.bytes, self.objects)

    @property
    def objects(self) -> int:
        return sum(len(step.objects) for step in self.steps)

    def __str__(self) -> str:
        return "\n".join(_table(self))


class _Cost(NamedTuple):
    """Compared in this order: the price (bytes or seconds) decides, then fewer objects, then
    fewer steps."""

    price: float = 0
    objects: int = 0
    steps: int = 0

    def then(self, objects: tuple[ObjectRef, ...], costs: Costs | None) -> "_Cost":
        size = sum(ref.size for ref in objects)
        price = size if costs is None else costs.seconds(size, len(objects))
        return _Cost(self.price + price, self.objects + len(objects), self.steps + 1)


class _Edge(NamedTuple):
    """The step from a node to `version`; `root` is what it requires of the node."""

    version: int
    root: str | None
    objects: tuple[ObjectRef, ...]


def plan(
    have: VersionRef | None,
    want: VersionRef,
    manifests: Mapping[int, Manifest],
    costs: Costs | None = None,
) -> Plan:
    """The cheapest path from `have` (None: nothing) to `want`: in bytes, or in seconds over the
    link of `costs`.

    `manifests` is asked for single versions and may read them on demand; a version it does not
    hold is treated as gone. Raises `UnknownVersionError` when `want` is not there or no path
    leads to it, `FormatError` when manifests contradict each other.
    """
    target = manifests.get(want.version)
    if target is None or target.ref != want:
        raise UnknownVersionError(
            f"Version {want} is not in this lineage; "
            "ask for one that `farcast inspect` shows, or check the run."
        )
    if have == want:
        return Plan(have=have, want=want, steps=(), bytes_full=target.bytes_full, costs=costs)
    edges = _search(have, want, manifests, costs)
    steps = tuple(_step(base, edge, manifests[edge.version]) for base, edge in edges)
    return Plan(have=have, want=want, steps=steps, bytes_full=target.bytes_full, costs=costs)


def _search(
    have: VersionRef | None,
    want: VersionRef,
    manifests: Mapping[int, Manifest],
    costs: Costs | None,
) -> list[tuple[int, _Edge]]:
    """(node before, edge) from the start to `want`, found backwards from `want`."""
    best: dict[int, _Cost] = {want.version: _Cost()}
    onward: dict[int, _Edge] = {}
    queue = [(_Cost(), want.version)]
    done: set[int] = set()
    while queue:
        cost, node = heapq.heappop(queue)
        if node in done:
            continue
        done.add(node)
        if _is_start(node, have, onward):
            return list(_walk(node, onward))
        if len(done) > MAX_MANIFESTS_READ:
            raise LimitError(
                f"More than {MAX_MANIFESTS_READ} versions lie before {want}; "
                "start from an empty replica, or check who writes to this store."
            )
        manifest = _linked(manifests, node, onward)
        if manifest is None:  # gone: no path leads through it
            continue
        for before, edge in _incoming(manifest):
            candidate = cost.then(edge.objects, costs)
            if before not in best or candidate < best[before]:
                best[before] = candidate
                onward[before] = edge
                heapq.heappush(queue, (candidate, before))
    raise UnknownVersionError(
        f"No path of deltas and anchors leads to {want} any more; "
        "ask for a newer version, whose anchor is still in the store."
    )


def _is_start(node: int, have: VersionRef | None, onward: Mapping[int, _Edge]) -> bool:
    if node == _NOTHING:
        return True
    # A replica whose bits are not those of the lineage's version (a lost fork) cannot build on
    # them; the node is then searched like any other.
    return (
        have is not None
        and node == have.version
        and node in onward
        and onward[node].root == have.root
    )


def _linked(
    manifests: Mapping[int, Manifest], node: int, onward: Mapping[int, _Edge]
) -> Manifest | None:
    """The manifest of `node`, checked against the edge through which it was reached."""
    manifest = manifests.get(node)
    edge = onward.get(node)
    if manifest is None or edge is None:
        return manifest
    if edge.root != manifest.root:
        raise FormatError(
            f"The delta to version {edge.version} names another content for version {node} "
            "than that version's manifest does; do not trust this store's history."
        )
    if manifest.anchor_version > manifests[edge.version].anchor_version:
        raise FormatError(
            f"Version {edge.version} names an older anchor than version {node} before it; "
            "do not trust this store's history."
        )
    return manifest


def _incoming(manifest: Manifest) -> Iterator[tuple[int, _Edge]]:
    """(node before, edge) for every way to get `manifest`'s version."""
    if manifest.anchor is not None:
        yield _NOTHING, _Edge(manifest.version, None, manifest.anchor)
    for delta in manifest.deltas:
        yield delta.base, _Edge(manifest.version, delta.base_root, delta.objects)


def _walk(start: int, onward: Mapping[int, _Edge]) -> Iterator[tuple[int, _Edge]]:
    node = start
    while node in onward:
        edge = onward[node]
        yield node, edge
        node = edge.version


def _step(base: int, edge: _Edge, manifest: Manifest) -> PlanStep:
    return PlanStep(
        kind="anchor" if base == _NOTHING else "delta",
        base=None if base == _NOTHING else base,
        version=edge.version,
        root=manifest.root,
        objects=edge.objects,
    )


def _table(plan: Plan) -> Iterator[str]:
    have = "nothing" if plan.have is None else f"version {plan.have.version}"
    yield f"plan for {plan.want.run_id}: from {have} to version {plan.want.version}"
    if not plan.steps:
        yield "  nothing to fetch"
        return
    heading = "" if plan.costs is None else f" {'seconds':>10}"
    yield f"  {'step':<6} {'base':>12} {'version':>12} {'objects':>8} {'bytes':>16}{heading}"
    for step in plan.steps:
        base = "-" if step.base is None else str(step.base)
        yield (
            f"  {step.kind:<6} {base:>12} {step.version:>12} "
            f"{len(step.objects):>8} {step.bytes:>16,}{_time(plan, step)}"
        )
    yield (
        f"  {'total':<6} {'':>12} {'':>12} {plan.objects:>8} {plan.bytes:>16,}{_time(plan, None)}"
    )
    yield f"  a full copy is {plan.bytes_full:,} bytes{_ratio(plan)}"


def _time(plan: Plan, step: PlanStep | None) -> str:
    """The last column: of a step, or with its first round trip of the whole."""
    if plan.costs is None:
        return ""
    seconds = plan.seconds if step is None else plan.costs.seconds(step.bytes, len(step.objects))
    return f" {seconds:>10,.2f}"


def _ratio(plan: Plan) -> str:
    if not plan.bytes or not plan.bytes_full:
        return ""
    return f", {plan.bytes_full / plan.bytes:,.1f} times this plan"
