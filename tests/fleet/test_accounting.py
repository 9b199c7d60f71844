"""Exactly once, and one root for each version: what differs is listed, whoever says it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from farcast.fleet.accounting import (
    MAX_LISTED,
    Published,
    SpanClaim,
    account,
    compare_roots,
    effective_steps,
    unrecorded_versions,
)
from farcast.fleet.records import Receipt, StepRecord

ROOT = {version: f"{version:064x}" for version in range(32)}


def step(version: int, at: int, *, who: str = "a", **more: Any) -> StepRecord:
    return StepRecord(
        version=version, step=at, root=more.pop("root", ROOT[version]), incarnation=who, **more
    )


def receipt(version: int, root: str | None = None) -> Receipt:
    return Receipt(
        replica_id="r1",
        version=version,
        root=root or ROOT[version],
        staged_seconds=0.1,
        commit_seconds=0.01,
        bytes_fetched=1,
    )


def published(count: int) -> list[Published]:
    return [Published(version=v, step=v, root=ROOT[v], by_delta=ROOT[v]) for v in range(count)]


def test_a_run_that_agrees_has_no_differences() -> None:
    steps = effective_steps(
        [step(0, 0), step(1, 1, consumed=("t1", "t2")), step(2, 2, dropped={"stale": ("t3",)})]
    )
    counted = account(["t1", "t2", "t3", "t4"], steps)
    assert counted.differences == ()
    assert (counted.submitted, counted.consumed, counted.stale, counted.unread) == (4, 2, 2, 1)
    assert counted.dropped == {"stale": 1}
    claims = {SpanClaim(1, ROOT[1]): "t4"}
    assert compare_roots(published(3), steps, [receipt(2)], claims) == []
    assert unrecorded_versions(published(3), steps) == []


def test_steps_lost_with_a_crash_are_void_and_their_trajectories_count_again() -> None:
    records = [
        step(0, 0),
        step(1, 1, consumed=("t1",)),
        step(2, 2, consumed=("t2",)),
        step(3, 3, consumed=("t3",)),
        step(4, 1, who="b", resumed_from=1),
        step(5, 2, who="b", resumed_from=1, consumed=("t2", "t3")),
    ]
    steps = effective_steps(records)
    assert [r.version for r in steps.kept] == [0, 1, 4, 5]
    assert [r.version for r in steps.void] == [2, 3]
    counted = account(["t1", "t2", "t3"], steps)
    assert counted.differences == ()
    assert counted.consumed == 3


def test_a_second_crash_voids_only_what_came_after_its_checkpoint() -> None:
    records = [
        step(0, 0),
        step(1, 1),
        step(2, 2),
        step(3, 1, who="b", resumed_from=1),
        step(4, 2, who="b", resumed_from=1),
        step(5, 3, who="b", resumed_from=1),
        step(6, 2, who="c", resumed_from=2),
        step(7, 3, who="c", resumed_from=2),
    ]
    assert [r.version for r in effective_steps(records).kept] == [0, 1, 3, 4, 6, 7]


def test_two_trainers_at_once_are_a_difference() -> None:
    records = [step(0, 0), step(1, 1), step(2, 1, who="b", resumed_from=0), step(3, 2)]
    assert any("another had taken over" in line for line in effective_steps(records).differences)


def test_a_missing_step_is_a_difference() -> None:
    assert effective_steps([step(0, 0), step(1, 1), step(2, 3)]).differences == (
        "version 2: step 3 follows step 1",
    )


def test_every_way_to_count_wrongly_is_listed() -> None:
    steps = effective_steps(
        [
            step(0, 0),
            step(1, 1, consumed=("twice", "both")),
            step(2, 2, consumed=("twice", "ghost"), dropped={"stale": ("both",)}),
        ]
    )
    assert account(["twice", "both", "again"], steps).differences == (
        "trajectory twice was trained on twice",
        "trajectory both was trained on and dropped",
        "trajectory ghost was counted but is not in the store",
    )


def test_a_trajectory_written_again_after_a_lost_answer_counts_once() -> None:
    counted = account(["t1", "t1"], effective_steps([step(0, 0), step(1, 1, consumed=("t1",))]))
    assert counted.differences == ()
    assert (counted.submitted, counted.consumed, counted.resent) == (1, 1, 1)


def test_one_cause_makes_a_bounded_list() -> None:
    many = tuple(f"t{i:04d}" for i in range(500))
    steps = effective_steps([step(0, 0), step(1, 1, consumed=many)])
    lines = account([], steps).differences
    assert len(lines) == MAX_LISTED + 1
    assert lines[-1].startswith("480 more")


def test_a_root_that_differs_names_who_says_so() -> None:
    wrong = "f" * 64
    steps = effective_steps([step(0, 0), step(1, 1, root=wrong)])
    versions = [
        Published(version=0, step=0, root=ROOT[0], by_delta=ROOT[0], by_anchor=wrong),
        Published(version=1, step=1, root=ROOT[1], by_delta=ROOT[1]),
    ]
    claims = {SpanClaim(1, wrong): "t1", SpanClaim(7, ROOT[7]): "t2"}
    lines = compare_roots(versions, steps, [receipt(0, wrong)], claims)
    assert [line.partition(",")[0] for line in lines] == [
        "version 0: the store rebuilds ffffffffffff by its anchor",
        "version 1: the trainer says ffffffffffff",
        "version 0: replica r1 says ffffffffffff",
        "version 1: trajectory t1 says ffffffffffff",
        "version 7: trajectory t2 names it",
    ]


def test_a_version_without_a_record_needs_a_crash_that_explains_it() -> None:
    assert unrecorded_versions(published(4), effective_steps([step(0, 0), step(2, 2)])) == [
        "version 1: the trainer left no record of it"
    ]
    lost = effective_steps([step(0, 0), step(1, 1), step(3, 1, who="b", resumed_from=1)])
    assert unrecorded_versions(published(4), lost) == []


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=4),
)
def test_whatever_crashes_each_trajectory_stands_in_one_place(
    sizes: list[int], crashes: list[tuple[int, int]]
) -> None:
    """A simulated trainer that really resumes from checkpoints is always found exact."""
    submitted = [f"t{i}" for i in range(sum(sizes))]
    records: list[StepRecord] = [step(0, 0)]
    position = {0: 0}  # read position in the checkpoint of each step
    at, resumed_from, read = 0, -1, 0
    plan = list(crashes)
    steps_left = plan.pop(0)[0] if plan else 99
    back = crashes[0][1] if crashes else 0
    version, who = 1, 0
    for size in sizes:
        if version >= len(ROOT):
            break
        if steps_left == 0:
            at = resumed_from = max(0, at - back)
            read, who = position[at], who + 1
            steps_left, back = plan.pop(0) if plan else (99, 0)
        taken = tuple(submitted[read : read + size])
        read, at, steps_left = read + len(taken), at + 1, steps_left - 1
        position[at] = read
        records.append(step(version, at, who=f"w{who}", resumed_from=resumed_from, consumed=taken))
        version += 1
    records[0] = step(0, 0, who="w0")
    counted = account(submitted, effective_steps(records))
    assert counted.differences == ()
    assert counted.consumed == read
    assert counted.submitted == counted.consumed + counted.stale
