"""Trajectories from interactions that are not ours to run: a harness asks an OpenAI-compatible
endpoint, and what passed becomes training data once somebody says how it ended.

The engine's own token ids and log-probs are kept; text is never encoded again. Requests of one
session are the turns of one episode, as long as each prompt begins with every token so far. Where
one does not (a template that drops earlier thoughts, a tokenizer that reads its own output
another way), a new segment begins and says so in its metadata (`drift`): training on tokens that
the model never saw together would be worse than a cut.

With a journal, an interaction is on disk before it is said to be recorded, and an outcome before it
is sent: a recorder that starts again on the same folder goes on where the last one was killed. What
is said twice counts once.

Refuses, with a reason and without touching the answer, what nobody can learn from: see `answers`.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from farcast.engines.base import Completion, FinishReason
from farcast.errors import FarcastError, FormatError, TrajectoryError
from farcast.interop.answers import (
    ASKED_FOR,
    NotRecordedError,
    read_answer,
    sampling_of,
    shown_role,
)
from farcast.interop.journal import Closed, Journal
from farcast.interop.outcomes import Feedback, Outcome
from farcast.rollout import Episode
from farcast.trajectory import Role, Trajectory, TrajectorySender, check_trajectory
from farcast.trajectory.wire import (
    MAX_FEEDBACK,
    MAX_TOKENS,
    SAID_BY_MODEL,
)
from farcast.types import NAME_PATTERN

MAX_SESSIONS = 4096
MAX_CLOSED = 1 << 16
IDLE_SECONDS = 3600.0
"""A session of which nothing was heard for so long has no outcome to come."""


class ClosedError(TrajectoryError):
    """A session went home with another outcome, or before what is now said of it."""


class _Step(msgspec.Struct, frozen=True, array_like=True):
    """One interaction as a session takes it in. `drift` says why a new segment begins."""

    drift: str | None
    shown: tuple[int, ...]
    shown_role: Role
    completion: Completion
    role: Role
    started: float
    ended: float
    sampling: tuple[float, float, int]
    experts: tuple[tuple[int, int, int], str, bytes] | None = None


class _Entry(msgspec.Struct, frozen=True):
    """What the journal holds of a session: one of these at a time."""

    step: _Step | None = None
    feedback: Feedback | None = None
    outcome: Outcome | None = None


class _Session:
    """The segments of one episode; the last one still grows."""

    def __init__(self, now: float) -> None:
        self.heard = now
        self.lock = threading.Lock()
        self.segments: list[Episode] = [Episode()]
        self.drifts: dict[int, str] = {}
        self.sampling: tuple[float, float, int] | None = None
        self.finish: FinishReason = "stop"
        self.feedback: list[Feedback] = []
        self.outcome: Outcome | None = None

    def apply(self, entry: _Entry) -> None:
        if entry.step is not None:
            self._take(entry.step)
        if entry.feedback is not None:
            self.feedback.append(entry.feedback)
        if entry.outcome is not None:
            self.outcome = entry.outcome

    def _take(self, step: _Step) -> None:
        if step.drift is not None:
            self.segments.append(Episode())
            self.drifts[len(self.segments) - 1] = step.drift
        episode = self.segments[-1]
        episode.show(step.shown, step.shown_role)
        episode.sampled(step.completion, step.role, started=step.started, ended=step.ended)
        if step.experts is not None:
            shape, dtype, data = step.experts
            episode.routed(np.frombuffer(data, dtype).reshape(shape))
        self.sampling, self.finish = step.sampling, step.completion.finish_reason

    @property
    def turns(self) -> int:
        """The model's turns so far."""
        return sum(t.role in SAID_BY_MODEL for e in self.segments for t in e.turns)


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
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self.recorded = self.refused = self.forgotten = 0
        if journal is not None:
            self._recall(journal)

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    def new_session(self) -> str:
        """A name for a session that its harness gave none."""
        return f"s-{secrets.token_hex(8)}"

    def record(
        self, session: str, request: Mapping[str, Any], answer: bytes, *, started: float
    ) -> None:
        """Take in one interaction; `request` as it was asked, `answer` as JSON. Raises
        `NotRecordedError`; the session then goes on without this turn."""
        try:
            self._record(session, request, answer, started)
        except NotRecordedError:
            self.refused += 1
            raise
        self.recorded += 1

    def feed_back(self, session: str, feedback: Feedback) -> None:
        """Note what was said of one of the model's turns, before the outcome. Durable as the turn
        is; saying it again does nothing."""
        held = self._open(session)
        with held.lock:
            self._refuse_if_closed(session, held)
            if feedback.turn >= held.turns:
                raise FormatError(
                    f"The session has {held.turns} turns of the model; name one, from 0."
                )
            said = [f.text for f in held.feedback if f.turn == feedback.turn]
            if feedback.text in said:
                return
            if len("\n".join([*said, feedback.text])) > MAX_FEEDBACK:
                raise FormatError(f"A turn takes {MAX_FEEDBACK} characters of feedback; cut it.")
            self._note(session, held, _Entry(feedback=feedback))

    def attach(self, outcome: Outcome) -> list[str]:
        """Close a session with its outcome; durable on return. The ids of its trajectories. Saying
        it again gives the same ids, and another outcome raises `ClosedError`.

        An error of the store leaves the session open for this outcome: attach it again."""
        digest = outcome.digest()
        with self._lock:
            closed = self._closed.get(outcome.session)
        if closed is None:
            session = self._open(outcome.session)
            with session.lock:
                return self._close(session, outcome, digest)
        if closed.digest != digest:
            raise ClosedError(f"The session {outcome.session} was closed with another outcome.")
        return closed.ids

    def _close(self, session: _Session, outcome: Outcome, digest: str) -> list[str]:
        if session.outcome is not None and session.outcome != outcome:
            raise ClosedError(
                f"Another outcome of the session {outcome.session} is on its way home already."
            )
        trajectories = self._trajectories(session, outcome)
        if session.outcome is None:
            for trajectory in trajectories:
                check_trajectory(trajectory)
            self._note(outcome.session, session, _Entry(outcome=outcome))
        self._sender.submit_many(trajectories)
        closed = Closed(outcome.session, digest, [t.id for t in trajectories])
        if self._journal is not None:
            self._journal.settle(closed)
        with self._lock:
            self._sessions.pop(outcome.session, None)
            self._remember(closed)
        return closed.ids

    def _record(self, name: str, request: Mapping[str, Any], answer: bytes, started: float) -> None:
        if NAME_PATTERN.fullmatch(name) is None or len(name) > 100:
            raise NotRecordedError(
                "A session's name has at most 100 letters, digits, '.', '_' or '-'; rename it."
            )
        sampling = sampling_of(request)
        prompt, completion, role, experts = read_answer(answer)
        with self._lock:
            if name in self._closed:
                raise NotRecordedError(f"The session {name} has ended; begin another one.")
            session = self._session(name)
        with session.lock:
            if session.outcome is not None:
                raise NotRecordedError(f"The session {name} has ended; begin another one.")
            if session.sampling not in (None, sampling):
                raise NotRecordedError(
                    "A session keeps one temperature, top_p and top_k; begin another session."
                )
            episode = session.segments[-1]
            held = len(episode.token_ids)
            if max(held, len(prompt)) + len(completion.token_ids) > MAX_TOKENS:
                raise NotRecordedError(f"The session is longer than {MAX_TOKENS} tokens; end it.")
            shown: Role = shown_role(request) if held else "user"
            drift = None
            try:
                episode.check_prompt(prompt)
            except FormatError as error:
                drift, held, shown = str(error)[:200], 0, "user"
            step = _Step(
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
            self._note(name, session, _Entry(step=step))

    def _note(self, name: str, session: _Session, entry: _Entry) -> None:
        """Durable before it counts."""
        if self._journal is not None:
            self._journal.append(name, msgspec.msgpack.encode(entry))
        session.apply(entry)

    def _recall(self, journal: Journal) -> None:
        """What an earlier recorder held; the outcomes that it had are sent when they are said
        again."""
        for closed in journal.closed():
            self._remember(closed)
        for name, entries in journal.sessions():
            if name in self._closed:
                journal.drop(name)
                continue
            session = self._sessions.setdefault(name, _Session(self._clock()))
            for entry in entries:
                session.apply(msgspec.msgpack.decode(entry, type=_Entry))

    def _remember(self, closed: Closed) -> None:
        self._closed[closed.session] = closed
        while len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def _open(self, name: str) -> _Session:
        with self._lock:
            session = self._sessions.get(name)
            if session is None and name in self._closed:
                raise ClosedError(f"The session {name} has gone home with its outcome.")
        if session is None:
            raise NotRecordedError(
                f"There is no open session {name}; it was never recorded, was closed long ago, or "
                "was idle for too long."
            )
        return session

    @staticmethod
    def _refuse_if_closed(name: str, session: _Session) -> None:
        if session.outcome is not None:
            raise ClosedError(f"The session {name} is going home with its outcome.")

    def _session(self, name: str) -> _Session:
        """The session, as the one heard of last; old ones go."""
        now = self._clock()
        session = self._sessions.pop(name, None) or _Session(now)
        session.heard = now
        self._sessions[name] = session
        while len(self._sessions) > MAX_SESSIONS or self._oldest_idle(now):
            old, _ = self._sessions.popitem(last=False)
            self.forgotten += 1
            if self._journal is not None:
                self._journal.drop(old)
        return session

    def _oldest_idle(self, now: float) -> bool:
        return now - next(iter(self._sessions.values())).heard > IDLE_SECONDS

    def _trajectories(self, session: _Session, outcome: Outcome) -> list[Trajectory]:
        """Without a group, the segments are one; in a group, each session has one place, and the
        last segment, whose prompt shows all before it, takes it."""
        numbers = list(range(len(session.segments)))
        size, group = len(numbers), outcome.group_id or outcome.session
        if outcome.group_id is not None:
            numbers, size = numbers[-1:], outcome.group_size
        temperature, top_p, top_k = session.sampling or (1.0, 1.0, 0)
        said = self._feedback(session, outcome)
        made = []
        for number in numbers:
            drift = session.drifts.get(number)
            before = session.segments[:number]
            first = sum(t.role in SAID_BY_MODEL for e in before for t in e.turns)
            trajectory = session.segments[number].trajectory(
                id=f"{outcome.session}-{number}",
                group_id=group,
                group_size=size,
                worker_id=self._sender.worker_id,
                reward=outcome.reward,
                rewards=outcome.rewards,
                finish_reason="aborted" if outcome.aborted else session.finish,
                task=outcome.task,
                seed=outcome.seed,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                engine=self._engine,
                metadata={**outcome.metadata, **({"drift": drift} if drift else {})},
            )
            made.append(_told(trajectory, said, first))
        return made

    @staticmethod
    def _feedback(session: _Session, outcome: Outcome) -> dict[int, str]:
        said: dict[int, list[str]] = {}
        for feedback in (*session.feedback, *outcome.feedback):
            if feedback.turn >= session.turns:
                raise FormatError(f"The session has no turn {feedback.turn} of the model.")
            texts = said.setdefault(feedback.turn, [])
            if feedback.text not in texts:
                texts.append(feedback.text)
        return {turn: "\n".join(texts)[:MAX_FEEDBACK] for turn, texts in said.items()}


def _told(trajectory: Trajectory, said: Mapping[int, str], first: int) -> Trajectory:
    """With the feedback on its turns, of which the first of the model's has number `first`."""
    turns, number = [], first
    for turn in trajectory.turns:
        if turn.role in SAID_BY_MODEL:
            turn = msgspec.structs.replace(turn, feedback=said.get(number, ""))
            number += 1
        turns.append(turn)
    return msgspec.structs.replace(trajectory, turns=tuple(turns))


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
            self._recorder.record(
                session,
                {**extra, **request},
                answer.model_dump_json().encode(),
                started=started,
            )
        except NotRecordedError as error:
            self._on_refused(error)
        return answer
