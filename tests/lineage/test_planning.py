"""Plans are the cheapest paths, never cycle, never cross a root that does not fit, and print."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcast.errors import ConfigError, FormatError, LimitError, UnknownVersionError
from farcast.lineage import (
    MAX_MANIFESTS_READ,
    Costs,
    Delta,
    Manifest,
    ObjectRef,
    Plan,
    check_anchor_every,
    is_anchor_due,
    plan,
    squash_spans,
)
from farcast.types import VersionRef


def root(version: int) -> str:
    return f"{version + 1000:064x}"


def at(version: int) -> VersionRef:
    return VersionRef("run1", version, root(version))


def objects(name: str, *sizes: int) -> tuple[ObjectRef, ...]:
    return tuple(
        ObjectRef(digest=f"{name}{i}".encode().hex().ljust(64, "0")[:64], size=size)
        for i, size in enumerate(sizes)
    )


def lineage(
    anchors: Mapping[int, int], deltas: Mapping[tuple[int, int], int]
) -> dict[int, Manifest]:
    """Manifests from sizes: anchors by version, deltas by (base, version)."""
    manifests = {}
    for version in sorted({*anchors, *(v for _, v in deltas)}):
        own = [(b, s) for (b, v), s in deltas.items() if v == version]
        manifests[version] = Manifest(
            run_id="run1",
            version=version,
            root=root(version),
            step=version,
            served_format="bf16",
            tensors=1,
            elements=1000,
            bytes_full=1000,
            changed=1,
            anchor_version=max(v for v in anchors if v <= version),
            anchor=objects(f"a{version}.", anchors[version]) if version in anchors else None,
            deltas=tuple(
                Delta(base=b, base_root=root(b), objects=objects(f"d{b}-{version}.", s))
                for b, s in own
            ),
            writer="w1",
        )
    return manifests


CHAIN = lineage({0: 100, 5: 100}, {(v - 1, v): 7 for v in range(1, 9)})


def route(found: Plan) -> list[tuple[int | None, int]]:
    return [(step.base, step.version) for step in found.steps]


def test_the_next_version_is_one_delta_and_reads_one_manifest() -> None:
    read: set[int] = set()

    class Lazy(Mapping[int, Manifest]):
        def __getitem__(self, key: int) -> Manifest:
            read.add(key)
            return CHAIN[key]

        def __iter__(self) -> Iterator[int]:
            return iter(CHAIN)

        def __len__(self) -> int:
            return len(CHAIN)

    assert route(plan(at(7), at(8), Lazy())) == [(7, 8)]
    assert read == {8}


def test_nothing_to_do() -> None:
    found = plan(at(8), at(8), CHAIN)
    assert found.steps == ()
    assert "nothing to fetch" in str(found)


def test_an_empty_replica_takes_the_anchor_and_the_deltas_after() -> None:
    assert route(plan(None, at(8), CHAIN)) == [(None, 5), (5, 6), (6, 7), (7, 8)]


def test_a_chain_cheaper_than_the_anchor_is_kept() -> None:
    assert route(plan(at(1), at(8), CHAIN)) == [(v, v + 1) for v in range(1, 8)]


def test_an_anchor_cheaper_than_the_chain_is_taken() -> None:
    dear = lineage({0: 100, 5: 10}, {(v - 1, v): 7 for v in range(1, 9)})
    assert route(plan(at(1), at(8), dear))[0] == (None, 5)


def test_squashed_deltas_fit() -> None:
    squashed = lineage({0: 100}, {**{(v - 1, v): 7 for v in range(1, 9)}, (4, 8): 9, (0, 4): 12})
    assert route(plan(at(0), at(8), squashed)) == [(0, 4), (4, 8)]
    assert route(plan(at(3), at(8), squashed)) == [(3, 4), (4, 8)]
    assert plan(at(3), at(8), squashed).bytes == 16


def test_going_back_needs_an_older_path() -> None:
    assert route(plan(at(8), at(6), CHAIN)) == [(None, 5), (5, 6)]


def test_equal_bytes_prefer_fewer_objects() -> None:
    tie = lineage({0: 100}, {(0, 1): 5, (1, 2): 5, (0, 2): 10})
    assert route(plan(at(0), at(2), tie)) == [(0, 2)]


def test_versions_that_are_gone_are_gone_around() -> None:
    left = {v: m for v, m in CHAIN.items() if v >= 5}
    assert route(plan(at(2), at(8), left))[0] == (None, 5)
    with pytest.raises(UnknownVersionError, match="newer version"):
        plan(None, at(8), {v: m for v, m in CHAIN.items() if v >= 6})


def test_unknown_wants_are_refused() -> None:
    with pytest.raises(UnknownVersionError):
        plan(None, at(9), CHAIN)
    with pytest.raises(UnknownVersionError):
        plan(None, VersionRef("run1", 8, root(7)), CHAIN)


def test_bits_of_a_lost_fork_are_not_built_upon() -> None:
    forked = VersionRef("run1", 7, "ee" * 32)
    assert route(plan(forked, at(8), CHAIN))[0] == (None, 5)
    assert route(plan(VersionRef("run1", 8, "ee" * 32), at(8), CHAIN))[0] == (None, 5)


def test_a_delta_that_names_another_root_for_its_base_is_refused() -> None:
    broken = dict(CHAIN)
    wrong = lineage({0: 100, 5: 100}, {(6, 7): 7})[7]
    broken[7] = Manifest(
        **{
            **{f: getattr(wrong, f) for f in wrong.__struct_fields__},
            "deltas": (Delta(base=6, base_root="ee" * 32, objects=objects("x", 1)),),
        }
    )
    with pytest.raises(FormatError, match="another content"):
        plan(None, at(8), broken)


def test_an_anchor_that_goes_backwards_is_refused() -> None:
    broken = dict(CHAIN)
    broken[7] = lineage({0: 100}, {(6, 7): 7})[7]
    with pytest.raises(FormatError, match="older anchor"):
        plan(None, at(8), broken)


def test_an_endless_lineage_is_cut_off() -> None:
    class Endless(Mapping[int, Manifest]):
        def __getitem__(self, version: int) -> Manifest:
            return lineage({0: 0}, {(version - 1, version): 0})[version]

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("nobody may iterate a lineage")

        def __len__(self) -> int:
            return 10**12

    with pytest.raises(LimitError, match=str(MAX_MANIFESTS_READ)):
        plan(None, at(10**9), Endless())


def test_the_table() -> None:
    assert str(plan(at(6), at(8), CHAIN)) == (
        "plan for run1: from version 6 to version 8\n"
        "  step           base      version  objects            bytes\n"
        "  delta             6            7        1                7\n"
        "  delta             7            8        1                7\n"
        "  total                                   2               14\n"
        "  a full copy is 1,000 bytes, 71.4 times this plan"
    )


def cheapest(manifests: Mapping[int, Manifest], have: int | None, want: int) -> int | None:
    """All paths by brute force, forwards in order of versions: deltas only lead upwards."""
    cost: dict[int, int] = {} if have is None else {have: 0}
    for version in sorted(manifests):
        ways = [
            cost[d.base] + sum(o.size for o in d.objects)
            for d in manifests[version].deltas
            if d.base in cost
        ]
        anchor = manifests[version].anchor
        if anchor is not None:
            ways.append(sum(o.size for o in anchor))
        if version in cost:
            ways.append(cost[version])
        if ways:
            cost[version] = min(ways)
    return cost.get(want)


@st.composite
def lineages(draw: st.DrawFn) -> dict[int, Manifest]:
    last = draw(st.integers(1, 12))
    size = st.integers(0, 30)
    anchors = {0: draw(size)}
    deltas: dict[tuple[int, int], int] = {}
    for version in range(1, last + 1):
        if draw(st.integers(0, 4)) == 0:
            anchors[version] = draw(st.integers(0, 90))
        for base in draw(st.sets(st.integers(0, version - 1), min_size=1, max_size=3)):
            deltas[base, version] = draw(size)
    made = lineage(anchors, deltas)
    gone = draw(st.sets(st.integers(1, last), max_size=3)) - {last}
    return {v: m for v, m in made.items() if v not in gone}


@given(lineages(), st.data())
def test_no_path_is_cheaper(manifests: dict[int, Manifest], data: st.DataObject) -> None:
    want = data.draw(st.sampled_from(sorted(manifests)))
    have = data.draw(st.none() | st.integers(0, 12))
    # A version that is gone from the store may still be what the replica has.
    best = cheapest(manifests, have, want)
    start = None if have is None else at(have)
    if best is None:
        with pytest.raises(UnknownVersionError):
            plan(start, at(want), manifests)
        return
    found = plan(start, at(want), manifests)
    assert found.bytes == best
    bases = [step.base for step in found.steps]
    assert not bases or bases[0] in (None, have)
    assert all(after.base == before.version for before, after in pairwise(found.steps))


def test_anchor_schedule() -> None:
    due = [0]
    for version in range(1, 60):
        if is_anchor_due(version, due[-1], 20):
            due.append(version)
    assert due == [0, 20, 40]
    assert is_anchor_due(0, None, 20)
    assert is_anchor_due(7, 6, 1)
    for every in (0, -1, 10**6):
        with pytest.raises(ConfigError):
            check_anchor_every(every)


def test_over_a_slow_line_fewer_bytes_win_and_over_a_long_one_fewer_objects() -> None:
    """Ten deltas of 10 bytes against one squashed delta of 150."""
    chain = lineage({0: 1000}, {(v - 1, v): 10 for v in range(1, 11)} | {(0, 10): 150})
    have, want = at(0), at(10)
    by_bytes = plan(have, want, chain)
    assert (len(by_bytes.steps), by_bytes.seconds) == (10, None)
    slow = plan(have, want, chain, Costs(rate=10, rtt=0.1, in_flight=1))
    assert len(slow.steps) == 10
    assert slow.seconds == pytest.approx(0.1 + 100 / 10 + 10 * 0.1)
    long = plan(have, want, chain, Costs(rate=10, rtt=2, in_flight=1))
    assert len(long.steps) == 1
    assert long.seconds == pytest.approx(2 + 150 / 10 + 2)
    assert "seconds" in str(long)
    assert "seconds" not in str(by_bytes)
    assert plan(want, want, chain, Costs(rate=10, rtt=2)).seconds == 0


FACTOR = 4
SPANNED = 700


def scheduled(delta: int, anchor: int, anchor_every: int) -> dict[int, Manifest]:
    """A long run on the schedule of a publisher. A change over `n` versions is smaller than `n`
    changes, as elements that change twice count once."""
    anchors = {v: anchor for v in range(0, SPANNED, anchor_every)}
    deltas = {(v - 1, v): delta for v in range(1, SPANNED)}
    for version in range(1, SPANNED):
        for span in squash_spans(version, FACTOR):
            deltas[version - span, version] = int(delta * span**0.9)
    return lineage(anchors, deltas)


SCHEDULED = [scheduled(100, 100_000, 20), scheduled(100, 2_000, 20), scheduled(100, 10**9, 2000)]


@given(st.sampled_from(SCHEDULED), st.integers(0, SPANNED - 1), st.integers(0, SPANNED - 1))
def test_any_later_version_is_a_logarithm_of_objects_away(
    manifests: dict[int, Manifest], one: int, other: int
) -> None:
    have, want = sorted((one, other))
    found = plan(at(have), at(want), manifests)
    levels = 1 + math.floor(math.log(max(1, want - have), FACTOR))
    assert found.objects <= 2 * (FACTOR - 1) * levels
    if one < other:  # a newcomer too
        fresh = plan(None, at(want), manifests)
        assert fresh.objects <= 1 + 2 * (FACTOR - 1) * (1 + math.floor(math.log(SPANNED, FACTOR)))
