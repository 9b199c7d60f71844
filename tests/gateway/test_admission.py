"""The gate between requests and commits: its table of states, and its one promise: nothing that
may not cross a commit is inside while one is at work."""

import threading
import time
from collections.abc import Callable

import pytest

from farcast.engines.admission import AdmissionGate, Constraint, Mode, NotAdmittedError, Ticket
from farcast.engines.http_engine import label_of
from farcast.errors import TargetUncertainError
from farcast.types import VersionRef


def ref(version: int) -> VersionRef:
    return VersionRef("run1", version, f"{version:064x}")


class Engine:
    """Holds a version; a commit under the gate moves it."""

    def __init__(self, **options: object) -> None:
        self.version: VersionRef | None = None
        self.gate = AdmissionGate(lambda: self.version, **options)  # type: ignore[arg-type]

    def commit(self, version: int) -> None:
        with self.gate.commit():
            self.version = ref(version)

    def enter(
        self,
        constraint: Constraint | None = None,
        *,
        crosses: bool = False,
        cut: Callable[[], None] = lambda: None,
    ) -> Ticket | None:
        return self.gate.enter(constraint or Constraint(), crosses=crosses, cut=cut)


def refusal(engine: Engine, constraint: Constraint | None = None) -> str:
    with pytest.raises(NotAdmittedError) as caught:
        engine.enter(constraint)
    assert caught.value.retry
    return caught.value.refusal


def test_nothing_enters_before_the_first_version() -> None:
    engine = Engine()
    assert refusal(engine) == "not_ready"
    assert engine.gate.ref is None
    engine.commit(0)
    ticket = engine.enter()
    assert ticket is not None
    assert ticket.ref == ref(0)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint(), None),
        (Constraint(min_version=4), None),
        (Constraint(min_version=5), None),
        (Constraint(min_version=6), "behind"),
        (Constraint(exact_version=5), None),
        (Constraint(exact_version=4), "passed"),
        (Constraint(exact_version=6), "behind"),
        (Constraint(min_version=0), None),
        (Constraint(exact_version=0), "passed"),
    ],
)
def test_what_is_asked_for_is_compared_with_what_is_live(
    constraint: Constraint, expected: str | None
) -> None:
    engine = Engine()
    engine.commit(5)
    if expected is None:
        assert engine.enter(constraint) is not None
    else:
        assert refusal(engine, constraint) == expected


def test_full_is_said_and_passes() -> None:
    engine = Engine(limit=2)
    engine.commit(0)
    first = engine.enter()
    assert first is not None
    assert engine.enter() is not None
    assert refusal(engine) == "full"
    engine.gate.leave(first)
    assert engine.enter() is not None


@pytest.mark.parametrize(
    ("mode", "crosses", "constraint", "drained"),
    [
        ("in_place", True, Constraint(), False),
        ("in_place", True, Constraint(min_version=1), False),
        ("in_place", True, Constraint(exact_version=1), True),
        ("in_place", False, Constraint(), True),
        ("drain", True, Constraint(), True),
        ("drain", False, Constraint(), True),
    ],
)
def test_a_commit_waits_for_those_that_may_not_cross(
    mode: Mode, crosses: bool, constraint: Constraint, drained: bool
) -> None:
    engine = Engine(mode=mode)
    engine.commit(1)
    ticket = engine.enter(constraint, crosses=crosses)
    assert ticket is not None
    committing = threading.Thread(target=engine.commit, args=(2,))
    committing.start()
    if drained:
        _until(lambda: engine.gate.phase == "draining")
        assert engine.enter() is None, "a new one that may not cross waits"
        time.sleep(0.05)
        assert engine.version == ref(1)
        assert engine.gate.leave(ticket) == (ref(1), ticket.epoch, True)
        committing.join(5)
    else:
        committing.join(5)
        left = engine.gate.leave(ticket)
        assert left.ref == ref(2)
        assert left.epoch == ticket.epoch + 1
    assert engine.version == ref(2)
    assert engine.gate.served(label_of(ref(1))) == ref(1)


def test_while_draining_in_place_those_that_may_cross_go_in() -> None:
    engine = Engine()
    engine.commit(1)
    pinned = engine.enter(Constraint(exact_version=1), crosses=True)
    assert pinned is not None
    committing = threading.Thread(target=engine.commit, args=(2,))
    committing.start()
    _until(lambda: engine.gate.phase == "draining")
    crossing = engine.enter(crosses=True)
    assert crossing is not None
    assert engine.enter(Constraint(exact_version=1), crosses=True) is None
    engine.gate.leave(pinned)
    committing.join(5)
    assert engine.gate.leave(crossing).ref == ref(2)


def test_what_outlasts_a_drain_is_cut_off() -> None:
    engine = Engine(drain_seconds=0.3)
    engine.commit(1)
    left = threading.Event()

    def cut() -> None:
        engine.gate.leave(ticket)
        left.set()

    ticket = engine.enter(cut=lambda: threading.Thread(target=cut).start())
    assert ticket is not None
    engine.commit(2)
    assert left.is_set()
    assert engine.gate.cut_off == 1


def test_a_commit_that_fails_opens_the_gate_at_the_old_version() -> None:
    engine = Engine()
    engine.commit(1)

    def fail() -> None:
        with engine.gate.commit():
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert engine.gate.phase == "open"
    assert engine.gate.ref == ref(1)


def test_an_uncertain_engine_closes_the_gate_for_good() -> None:
    def uncertain() -> VersionRef:
        raise TargetUncertainError("The engine is torn; replace it.")

    gate = AdmissionGate(uncertain)
    with gate.commit():
        pass
    assert gate.ref is None
    assert gate.closed_because == "The engine is torn; replace it."
    with pytest.raises(NotAdmittedError, match="torn"):
        gate.enter(Constraint(), crosses=False, cut=lambda: None)


def test_a_lost_engine_and_a_forgotten_version() -> None:
    engine = Engine()
    engine.commit(3)
    engine.gate.lose("It does not answer; look.")
    assert refusal(engine) == "not_ready"
    engine.gate.regain()
    ticket = engine.enter()
    assert ticket is not None
    engine.gate.leave(ticket)
    engine.gate.forget("It was restarted; wait.")
    assert refusal(engine) == "not_ready"
    assert engine.gate.held is None
    engine.commit(3)
    assert engine.enter() is not None


def test_a_leaving_replica_stays_shut_whatever_its_engine_does() -> None:
    engine = Engine()
    engine.commit(1)
    inside = engine.enter()
    assert inside is not None
    engine.gate.close()
    engine.gate.lose("It does not answer; look.")
    engine.gate.regain()
    assert refusal(engine) == "not_ready"
    assert engine.gate.leave(inside).ref == ref(1)


def test_no_request_begins_under_another_version_than_it_is_told() -> None:
    """Eight threads ask while a ninth commits: the version captured is the one that is live for
    as long as a request is inside that may not cross."""
    engine, wrong, over = Engine(), [], threading.Event()
    engine.commit(0)

    def ask(low: bool) -> None:
        while not over.is_set():
            try:
                want = engine.version.version if low and engine.version else None
                ticket = engine.enter(Constraint(min_version=want))
            except NotAdmittedError:
                continue
            if ticket is None:
                time.sleep(0.0005)
                continue
            if want is not None and ticket.ref.version < want:
                wrong.append((ticket.ref, want))
            time.sleep(0.0002)
            if engine.version != ticket.ref:
                wrong.append((ticket.ref, engine.version))
            engine.gate.leave(ticket)

    threads = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for version in range(1, 101):
        engine.commit(version)
    over.set()
    for thread in threads:
        thread.join(5)
    assert not wrong
    assert engine.gate.in_flight == 0


def _until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_who_was_inside_while_the_engine_came_back_with_other_weights_is_told_nothing() -> None:
    """A request that was sent once more, to the new process, was not written by the version."""
    engine = Engine()
    engine.commit(0)
    before = engine.enter(crosses=True)
    assert before is not None
    engine.gate.lose("The engine ended its connection.")
    engine.gate.forget("It is brought to a version again.")
    engine.commit(0)
    after = engine.enter(crosses=True)
    assert after is not None
    assert not engine.gate.leave(before).same_engine
    assert engine.gate.leave(after).same_engine
