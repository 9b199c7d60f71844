"""Trajectories from interactions that are not ours to run: a harness asks an OpenAI-compatible
endpoint, and what passed becomes training data once somebody says how it ended.

The engine's own token ids and log-probs are kept; text is never encoded again. Requests of one
session are the turns of one episode, as long as each prompt begins with every token so far. Where
one does not (a template that drops earlier thoughts, a tokenizer that reads its own output
another way), a new segment begins and says so in its metadata (`drift`): training on tokens that
the model never saw together would be worse than a cut.

With a journal, an interaction is on disk before it is said to be recorded, and an outcome before it
is sent: a recorder that starts again on the same folder goes on where the last one was killed, and
`send_pending` sends what that had not. What is said twice counts once.

Refuses, with a reason and without touching the answer, what nobody can learn from: see `answers`.
Refuses an outcome whose trajectories could not be sent, before it counts. Never gives up a session
to make room for another.
"""

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from farcast.errors import (
    ConfigError,
    FarcastError,
    FormatError,
    StoreUnavailableError,
    TrajectoryError,
    TrajectoryTooLargeError,
)
from farcast.interop.answers import (
    ASKED_FOR,
    NotRecordedError,
    read_answer,
    sampling_of,
    shown_role,
)
from farcast.interop.journal import Closed, Journal
from farcast.interop.outcomes import Feedback, Outcome, checked
from farcast.interop.sessions import Entry, Session, Step
from farcast.trajectory import Role, TrajectorySender
from farcast.types import NAME_PATTERN

MAX_SESSIONS = 4096
"""Open at once. A session of 100,000 tokens takes about 5 MB."""

MAX_CLOSED = 1 << 16

MAX_SESSION_NAME = 100
"""Letters; an id has 28 more for what makes it the only one."""

IDLE_SECONDS = 3600.0
"""A session of which nothing was heard for so long has no outcome to come."""

EMPTY_SECONDS = 60.0
"""A session of which nothing could be recorded makes room for others after so long."""

_LOG = logging.getLogger(__name__)


class ClosedError(TrajectoryError):
    """A session went home with another outcome, or before what is now said of it."""


class TooManySessionsError(NotRecordedError):
    """As many sessions are open as the recorder holds; one has to end first."""

    retry = True


class Recorder:
    """Holds open sessions, and sends each home with its outcome. Safe for several threads."""

    def __init__(
        self,
        sender: TrajectorySender,
        *,
        engine: str = "",
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender = sender
        self._engine = engine
        self._journal = journal
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self._is_failing = False
        self.recorded = self.forgotten = 0
        self.refused = 0
        """Interactions that only passed; `failed` of them because of the recorder itself."""
        self.failed = 0
        if journal is not None:
            self._recall(journal)

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    @property
    def set_aside(self) -> int:
        """Sessions of the journal that could not be read; their files are kept."""
        return 0 if self._journal is None else len(self._journal.set_aside)

    @property
    def pending(self) -> list[str]:
        """Sessions whose outcome is known and which are not home yet."""
        with self._lock:
            return [name for name, s in self._sessions.items() if s.outcome is not None]

    def new_session(self) -> str:
        """A name for a session that its harness gave none."""
        return f"s-{secrets.token_hex(8)}"

    def record(
        self, session: str, request: Mapping[str, Any], answer: bytes, *, started: float
    ) -> None:
        """Take in one interaction; `request` as it was asked, `answer` as JSON. Raises
        `NotRecordedError` and nothing else, since an answer is worth more than its record; the
        session then goes on without this turn."""
        try:
            self._record(session, request, answer, started)
        except NotRecordedError:
            self._count(refused=1)
            raise
        except Exception as error:  # it is said in the log, and the answer passes all the same
            self._count(refused=1, failed=1)
            if not self._is_failing:
                _LOG.warning("Nothing is recorded for now, answers only pass: %s", error)
            self._is_failing = True
            raise NotRecordedError(f"The recorder failed. {error}"[:400]) from error
        self._count(recorded=1)
        if self._is_failing:
            _LOG.warning("Answers are recorded again.")
        self._is_failing = False

    def feed_back(self, session: str, feedback: Feedback) -> None:
        """Note what was said of one of the model's turns, before the outcome. Durable as the turn
        is; saying it again does nothing."""
        held = self._open(session)
        with held.lock:
            if held.outcome is not None:
                raise ClosedError(f"The session {session} is going home with its outcome.")
            if held.check_feedback(feedback):
                self._note(session, held, Entry(feedback=feedback))

    def attach(self, outcome: Outcome) -> list[str]:
        """Close a session with its outcome; durable on return. The ids of its trajectories. Saying
        it again gives the same ids, and another outcome raises `ClosedError`.

        `FormatError` and `TrajectoryTooLargeError` leave the session open for a better outcome, any
        other error for this one: attach it again, or call `send_pending`."""
        with self._lock:
            closed = self._closed.get(outcome.session)
            session = self._sessions.get(outcome.session)
            if session is not None:
                self._hear(outcome.session, session)
        if closed is not None:
            return self._same(closed, checked(outcome))
        if session is None:
            raise _unknown(outcome.session)
        with session.lock:
            return self._close(session, checked(outcome))

    def send_pending(self) -> int:
        """Send home what has its outcome and was cut off or refused before; how many went. Raises
        what the store raises; an outcome that cannot be sent at all is given up with a warning, and
        its session is open again."""
        sent = 0
        for name in self.pending:
            session = self._sessions.get(name)
            if session is None:
                continue
            with session.lock:
                if session.outcome is None:
                    continue
                try:
                    self._close(session, session.outcome)
                except (FormatError, TrajectoryTooLargeError) as error:
                    session.outcome = None
                    _LOG.warning("The outcome of session %s cannot be sent: %s", name, error)
                else:
                    sent += 1
        return sent

    def _close(self, session: Session, outcome: Outcome) -> list[str]:
        with self._lock:
            closed = self._closed.get(outcome.session)
        if closed is not None:  # while its lock was waited for
            return self._same(closed, outcome)
        if session.outcome not in (None, outcome):
            raise ClosedError(
                f"Another outcome of the session {outcome.session} is on its way home already."
            )
        trajectories = session.trajectories(
            outcome, worker_id=self._sender.worker_id, engine=self._engine
        )
        if session.outcome is None:
            self._sender.check(trajectories)
            promise = Entry(outcome=outcome, since=self._position(), worker=self._sender.worker_id)
            self._note(outcome.session, session, promise)
        since = session.since if session.was_cut_off else None
        self._sender.submit_many(trajectories, since=since)
        closed = Closed(outcome.session, outcome.digest(), [t.id for t in trajectories])
        if self._journal is not None:
            self._journal.settle(closed)
        with self._lock:
            self._sessions.pop(outcome.session, None)
            self._remember(closed)
        return closed.ids

    @staticmethod
    def _same(closed: Closed, outcome: Outcome) -> list[str]:
        if closed.digest != outcome.digest():
            raise ClosedError(f"The session {outcome.session} was closed with another outcome.")
        return closed.ids

    def _position(self) -> int:
        """No batch below this number holds what is sent from now on."""
        try:
            return self._sender.next_sequence
        except StoreUnavailableError:
            return 0

    def _record(self, name: str, request: Mapping[str, Any], answer: bytes, started: float) -> None:
        if NAME_PATTERN.fullmatch(name) is None or len(name) > MAX_SESSION_NAME:
            raise NotRecordedError(
                f"A session's name has at most {MAX_SESSION_NAME} letters, digits, '.', '_' or "
                "'-'; rename it."
            )
        sampling = sampling_of(request)
        prompt, completion, role, experts = read_answer(answer)
        with self._lock:
            if name in self._closed:
                raise NotRecordedError(f"The session {name} has ended; begin another one.")
            session = self._session(name)
        with session.lock:
            if session.outcome is not None or name in self._closed:
                raise NotRecordedError(f"The session {name} has ended; begin another one.")
            episode = session.segments[-1]
            held, drift = len(episode.token_ids), None
            shown: Role = shown_role(request) if held else "user"
            try:
                episode.check_prompt(prompt)
            except FormatError as error:
                drift, held, shown = str(error)[:200], 0, "user"
            step = Step(
                drift=drift,
                shown=tuple(prompt[held:]),
                shown_role=shown,
                completion=completion,
                role=role,
                started=started,
                ended=time.time(),
                sampling=sampling,
                experts=None
                if experts is None
                else (experts.shape, experts.dtype.str, experts.tobytes()),
            )
            self._note(name, session, Entry(step=session.check_step(step)))

    def _note(self, name: str, session: Session, entry: Entry) -> None:
        """Durable before it counts."""
        if not session.is_noted:
            entry = msgspec.structs.replace(entry, life=session.life)
        if self._journal is not None:
            self._journal.append(name, msgspec.msgpack.encode(entry))
        session.apply(entry)

    def _recall(self, journal: Journal) -> None:
        """What an earlier recorder held; what cannot be read is kept aside."""
        for closed in journal.closed():
            self._remember(closed)
        for name, entries in journal.sessions():
            if name in self._closed:
                journal.drop(name)
                continue
            session = Session(self._clock())
            try:
                for entry in entries:
                    session.apply(msgspec.msgpack.decode(entry, type=Entry))
            except (ValueError, TypeError):
                journal.put_aside(name)
                continue
            session.was_cut_off = session.outcome is not None
            if session.worker not in ("", self._sender.worker_id):
                raise ConfigError(
                    f"The journal has outcomes that the recorder {session.worker} began to send, "
                    f"not {self._sender.worker_id}; start it with that id."
                )
            self._sessions[name] = session

    def _remember(self, closed: Closed) -> None:
        self._closed[closed.session] = closed
        while len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def _open(self, name: str) -> Session:
        with self._lock:
            session = self._sessions.get(name)
            if session is not None:
                self._hear(name, session)
                return session
            if name in self._closed:
                raise ClosedError(f"The session {name} has gone home with its outcome.")
        raise _unknown(name)

    def _session(self, name: str) -> Session:
        """The session, as the one heard of last; idle ones go."""
        session = self._sessions.get(name)
        if session is None:
            self._make_room()
            session = self._sessions[name] = Session(self._clock())
        self._hear(name, session)
        return session

    def _hear(self, name: str, session: Session) -> None:
        session.heard = self._clock()
        self._sessions.move_to_end(name)

    def _make_room(self) -> None:
        now = self._clock()
        for name, session in list(self._sessions.items()):
            idle = now - session.heard
            if idle <= EMPTY_SECONDS:
                break
            if not session.is_noted:
                del self._sessions[name]
            elif session.outcome is None and idle > IDLE_SECONDS:
                del self._sessions[name]
                self.forgotten += 1
                self._drop(name)
        if len(self._sessions) >= MAX_SESSIONS:
            raise TooManySessionsError(
                f"{MAX_SESSIONS} sessions are open, and no more are recorded; attach an outcome to "
                "those that have ended."
            )

    def _drop(self, name: str) -> None:
        if self._journal is None:
            return
        try:
            self._journal.drop(name)
        except FarcastError as error:
            _LOG.warning("The idle session %s stays on disk: %s", name, error)

    def _count(self, *, recorded: int = 0, refused: int = 0, failed: int = 0) -> None:
        with self._lock:
            self.recorded += recorded
            self.refused += refused
            self.failed += failed


def _unknown(name: str) -> NotRecordedError:
    return NotRecordedError(
        f"There is no open session {name[:130]}; it was never recorded, was closed long ago, or "
        "was idle for too long."
    )


class RecordedClient:
    """An OpenAI-compatible client whose chat completions are recorded.

    `client` is an `openai.OpenAI`, or anything with `chat.completions.create` whose answers have
    `model_dump_json`. What cannot be recorded raises nothing: `on_refused` is told.
    """

    def __init__(
        self,
        client: Any,
        recorder: Recorder,
        *,
        on_refused: Callable[[FarcastError], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._on_refused = on_refused

    def chat(self, session: str, **request: Any) -> Any:
        """`client.chat.completions.create(**request)`, as a turn of `session`."""
        extra = {**(request.pop("extra_body", None) or {}), **ASKED_FOR}
        started = time.time()
        answer = self._client.chat.completions.create(
            **{**request, "logprobs": True}, extra_body=extra
        )
        try:
            data = answer.model_dump_json().encode()
            self._recorder.record(session, {**extra, **request}, data, started=started)
        except NotRecordedError as error:
            self._on_refused(error)
        except Exception as error:  # noqa: BLE001 - whatever a client's answer raises, it is the caller's
            self._on_refused(NotRecordedError(f"The answer is not understood ({error})."[:300]))
        return answer
