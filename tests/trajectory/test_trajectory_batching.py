"""Every trajectory that is added is taken in a whole group, dropped for one reason, or waiting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farcast.errors import FormatError
from farcast.trajectory import (
    Group,
    GroupBatcher,
    RoutedExperts,
    Trajectory,
    oldest_version,
    staleness_of,
)
from farcast.trajectory.header import MAX_POLICIES
from trajectory_world import RUN, episode, group, ids, root_of, span


def batcher(max_staleness: int = 2, group_timeout: float = 60.0) -> GroupBatcher:
    return GroupBatcher(RUN, max_staleness=max_staleness, group_timeout=group_timeout)


def taken(groups: list[Group]) -> list[list[str]]:
    return [ids(list(g.members)) for g in groups]


def test_only_whole_groups_and_exactly_as_many_as_asked() -> None:
    held = batcher()
    held.add([*group("a")[:3], *group("b"), *group("c")], now=0)
    assert held.whole_groups() == 2
    assert held.take(3, version=0, now=0) == []
    assert taken(held.take(1, version=0, now=0)) == [ids(group("b"))]
    held.add(group("a")[3:], now=1)
    assert taken(held.take(2, version=0, now=1)) == [ids(group("a")), ids(group("c"))]
    assert held.waiting == 0
    assert held.drain_dropped() == {}


def test_order_of_arrival_does_not_change_a_group() -> None:
    one, two = batcher(), batcher()
    one.add(group("a"), now=0)
    two.add(reversed(group("a")), now=0)
    assert one.take(1, version=0, now=0) == two.take(1, version=0, now=0)


def test_case_083_an_aborted_member_drops_its_group_and_no_other() -> None:
    """Groups of four: A loses a member, B and C are complete, so the total is still divisible."""
    first = [episode(f"A-{i}", group="A", size=4) for i in range(3)]
    lost = episode("A-3", group="A", size=4, finish_reason="aborted", reward=0.0)
    held = batcher()
    held.add([first[0], lost, *group("B"), first[1], *group("C"), first[2]], now=0)
    assert taken(held.take(2, version=0, now=0)) == [ids(group("B")), ids(group("C"))]
    assert {k: set(v) for k, v in held.drain_dropped().items()} == {
        "partial": {"A-0", "A-1", "A-2", "A-3"}
    }


def test_case_081_a_member_that_never_comes_releases_its_group() -> None:
    held = batcher(group_timeout=60)
    held.add(group("a")[:3], now=10)
    assert held.take(1, version=0, now=69.9) == []
    assert held.waiting == 3
    assert held.take(1, version=0, now=70) == []
    assert held.drain_dropped() == {"partial": ("a-0", "a-1", "a-2")}
    held.add(group("a")[3:], now=71)
    assert held.waiting == 0
    assert held.drain_dropped() == {"partial": ("a-3",)}


@pytest.mark.parametrize(("version", "kept"), [(7, True), (9, True), (10, False)])
def test_staleness_is_judged_when_the_group_is_taken(version: int, kept: bool) -> None:
    held = batcher(max_staleness=2)
    held.add(group("a", version=7), now=0)
    groups = held.take(1, version=version, now=0)
    assert bool(groups) is kept
    assert held.drain_dropped() == ({} if kept else {"stale": tuple(ids(group("a")))})


def test_the_oldest_token_in_the_loss_decides() -> None:
    two = episode(spans=(span(0, 3, 1), span(3, 5, 6), span(5, 8, 9)))
    assert oldest_version(two) == 6  # the tokens of version 1 are not in the loss
    assert staleness_of(two, 9) == 3
    nothing = episode(loss_mask=(False,) * 8)
    assert oldest_version(nothing) is None
    assert staleness_of(nothing, 9) == 0


def test_case_063_staleness_after_a_resume_counts_from_the_version_that_was_published() -> None:
    """Published to v7, restarted, next publish is v8: a trajectory of v7 is one version old."""
    held = batcher()
    held.add(group("a", version=7), now=0)
    (one,) = held.take(1, version=8, now=0)
    assert one.oldest_version == 7
    assert [staleness_of(member, 8) for member in one.members] == [1] * 4


def test_one_stale_member_drops_the_group() -> None:
    held = batcher(max_staleness=2)
    held.add([*group("a", version=5)[:3], episode("a-3", group="a", size=4, version=1)], now=0)
    assert held.take(1, version=5, now=0) == []
    assert held.totals == {"invalid": 0, "partial": 0, "stale": 4}


def test_versions_that_were_never_published_are_invalid() -> None:
    held = batcher()
    held.add(
        [*group("future", version=4), *group("other", version=3), *group("ok", version=2)], now=0
    )
    roots = {2: root_of(2), 3: root_of(999)}
    assert taken(held.take(1, version=3, now=0, root_of=roots.get)) == [ids(group("ok"))]
    assert held.drain_dropped() == {"invalid": tuple(ids(group("future") + group("other")))}


def test_a_group_that_contradicts_itself_is_invalid() -> None:
    held = batcher()
    held.add([*group("a")[:2], episode("a-x", group="a", size=5), group("a")[3]], now=0)
    assert held.take(1, version=0, now=0) == []
    assert held.drain_dropped() == {"invalid": ("a-0", "a-1", "a-x", "a-3")}


def test_a_group_routed_by_models_of_different_shapes_is_invalid_and_ends_no_run() -> None:
    def routed(layers: int, width: int = 1) -> RoutedExperts:
        return RoutedExperts(layers=layers, top_k=2, width=width, ids=bytes(8 * layers * 2 * width))

    shapes = {
        "layers": (routed(3), routed(4)),
        "width": (routed(3), routed(3, width=2)),
        "same": (routed(3), routed(3)),
        "none": (routed(3), None),
    }
    held = batcher()
    for name, experts in shapes.items():
        members = zip(group(name, 3), [*experts, experts[0]], strict=True)
        held.add([replace(member, experts=e) for member, e in members], now=0)
    saved = held.state(now=0)
    assert held.drain_dropped() == {
        "invalid": tuple(f"{name}-{i}" for name in ("layers", "width") for i in range(3))
    }
    restored = batcher()
    restored.restore(saved, now=0)
    assert taken(restored.take(2, version=0, now=0)) == [ids(group(n, 3)) for n in ("same", "none")]
    assert restored.totals == {"invalid": 6, "partial": 0, "stale": 0}


def test_a_group_of_very_many_versions_is_kept_in_several_batches() -> None:
    many = MAX_POLICIES // 2 + 1
    members = [
        episode(
            f"g-{i}",
            group="g",
            size=2,
            prompt=0,
            answer=many,
            turns=(),
            spans=tuple(span(at, at + 1, i * many + at) for at in range(many)),
        )
        for i in range(2)
    ]
    held, restored = batcher(), batcher()
    held.add(members, now=0)
    restored.restore(held.state(now=0), now=0)
    assert restored.waiting == 2


def test_a_group_that_no_checkpoint_can_hold_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A writer may have compressed it better than we do."""
    held = batcher()
    held.add([*group("large", 2, answer=3000), *group("small", 2)], now=0)
    monkeypatch.setattr("farcast.trajectory.encoding.MAX_BATCH_BYTES", 4096)
    saved = held.state(now=0)
    restored = batcher()
    restored.restore(saved, now=0)
    assert restored.drain_dropped() == {"invalid": ("large-0", "large-1")}
    assert taken(restored.take(1, version=0, now=0)) == [ids(group("small", 2))]


def test_a_surplus_member_and_a_repeated_one() -> None:
    held = batcher()
    held.add([*group("a"), group("a")[0]], now=0)
    assert held.repeated == 1
    held.take(1, version=0, now=0)
    held.add([episode("a-9", group="a", size=4)], now=0)
    assert held.drain_dropped() == {"invalid": ("a-9",)}


def test_truncated_answers_stay() -> None:
    held = batcher()
    held.add(group("a", finish_reason="length"), now=0)
    assert len(held.take(1, version=0, now=0)) == 1


def test_state_carries_everything_over() -> None:
    held = batcher(group_timeout=60)
    late = group("late")
    held.add([*late[:2], *group("whole"), *group("old", version=0)], now=100)
    held.take(9, version=5, now=110)
    held.add(group("fresh", version=5), now=130)
    saved = held.state(now=140)

    restored = batcher(group_timeout=60)
    restored.restore(saved, now=5000)
    assert restored.state(now=5000) == saved
    assert restored.drain_dropped() == held.drain_dropped()
    assert restored.totals == held.totals
    assert taken(restored.take(1, version=5, now=5000)) == [ids(group("fresh"))]
    restored.take(1, version=5, now=5019)
    assert restored.waiting == 2
    restored.take(1, version=5, now=5020)  # 40 s before, 20 s since
    assert restored.drain_dropped() == {"partial": ("late-0", "late-1")}
    restored.add([*late[2:], group("old")[0]], now=5021)
    assert restored.drain_dropped() == {"partial": ("late-2", "late-3"), "stale": ("old-0",)}


@pytest.mark.parametrize("state", [b"", b"\x80", b"cos\nsystem\n(S'x'\ntR.", b"\xc1"])
def test_a_state_that_is_not_valid_is_refused(state: bytes) -> None:
    with pytest.raises(FormatError):
        batcher().restore(state, now=0)
    other = GroupBatcher("run2", max_staleness=1, group_timeout=1).state(now=0)
    with pytest.raises(FormatError, match="run2"):
        batcher().restore(other, now=0)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Trajectory]:
    made = [
        episode(
            f"{name}-{i}",
            group=name,
            size=draw(st.sampled_from([3, 3, 3, 3, 2])),
            version=draw(st.integers(0, 4)),
            finish_reason=draw(st.sampled_from(["stop", "length", "stop", "stop", "aborted"])),
        )
        for name in draw(st.sets(st.sampled_from("abcdef"), min_size=1))
        for i in range(draw(st.integers(1, 3)))
    ]
    return draw(st.permutations(made))


@given(arrivals(), st.data())
@settings(max_examples=80, deadline=None)
def test_each_id_ends_in_exactly_one_place(given_: list[Trajectory], data: st.DataObject) -> None:
    held, now, used, dropped = batcher(1, 10), 0.0, [], []
    for trajectory in given_:
        held.add([trajectory], now=now)
        now += data.draw(st.sampled_from([0.0, 1.0, 6.0]))
        for one in held.take(1, version=data.draw(st.integers(3, 5)), now=now):
            assert len(one.members) == one.members[0].group_size
            used += ids(list(one.members))
        if data.draw(st.booleans()):
            saved, held = held.state(now=now), batcher(1, 10)
            held.restore(saved, now=now)
        if data.draw(st.booleans()):
            dropped += [i for left in held.drain_dropped().values() for i in left]
    held.take(9, version=5, now=now + 10)
    dropped += [i for left in held.drain_dropped().values() for i in left]
    rest = held.waiting
    assert len(used) + len(dropped) + rest == len(given_)
    assert len(set(used) | set(dropped)) == len(used) + len(dropped)
