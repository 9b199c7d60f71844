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

Refuses, with a reason and without touching the answer: what has no token ids or log-probs, greedy
sampling, several choices, and tokens of which nobody can say which version wrote them.
"""

import base64
import io
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from farcast.engines.base import Completion, FinishReason
from farcast.errors import FarcastError, FormatError, TrajectoryError
from farcast.interop.journal import Closed, Journal
from farcast.rollout import Episode
from farcast.trajectory import Role, Trajectory, TrajectorySender, check_trajectory
from farcast.trajectory.wire import (
    MAX_EXPERT_LAYERS,
    MAX_EXPERTS_PER_TOKEN,
    MAX_FEEDBACK,
    MAX_TOKENS,
    SAID_BY_MODEL,
)
from farcast.types import NAME_PATTERN, Name, PolicySpan

MAX_SESSIONS = 4096
MAX_CLOSED = 1 << 16
IDLE_SECONDS = 3600.0
"""A session of which nothing was heard for so long has no outcome to come."""

_ASKED_FOR: Mapping[str, Any] = {"return_token_ids": True}


class NotRecordedError(TrajectoryError):
    """An interaction cannot become training data; the message says why."""


class ClosedError(TrajectoryError):
    """A session went home with another outcome, or before what is now said of it."""


class Feedback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was said of a turn, later. `turn` counts the model's turns from 0."""

    turn: Annotated[int, msgspec.Meta(ge=0)]
    text: Annotated[str, msgspec.Meta(max_length=MAX_FEEDBACK)]


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a session ended. With `group_id`, sessions of one question make one GRPO group of
    `group_size`; `aborted` releases the group instead of leaving it to wait."""

    session: Name
    reward: float
    rewards: dict[str, float] = {}
    group_id: Name | None = None
    group_size: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1
    task: Annotated[str, msgspec.Meta(max_length=1 << 10)] = ""
    seed: int = 0
    aborted: bool = False
    feedback: tuple[Feedback, ...] = ()
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=256)] = {}


class _At(msgspec.Struct):
    version: int
    root: str


class _Span(msgspec.Struct):
    start: int
    end: int
    version: int
    root: str
    choice: int = 0


class _Provenance(msgspec.Struct):
    start: _At
    spans: list[_Span] | None = []


class _Token(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None
    token_logprobs: list[float | None] | None = None


class _Message(msgspec.Struct):
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    message: _Message | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    farcast: _Provenance | None = None


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
        digest = _digest(outcome)
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
        sampling = _sampling(request)
        prompt, completion, role, experts = _read(answer)
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
            shown: Role = _shown_role(request) if held else "user"
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


def _digest(outcome: Outcome) -> str:
    return blake3(msgspec.json.encode(outcome, order="deterministic")).hexdigest()


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
        extra = {**(request.pop("extra_body", None) or {}), **_ASKED_FOR}
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


def asking_for_tokens(path: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """A request as it has to be asked so that its answer can be recorded."""
    more = {"logprobs": True} if path.endswith("/chat/completions") else {"logprobs": 1}
    return {**request, **_ASKED_FOR, **more}


def _sampling(request: Mapping[str, Any]) -> tuple[float, float, int]:
    try:
        temperature = float(request.get("temperature", 1.0))
        top_p, top_k = float(request.get("top_p", 1.0)), max(int(request.get("top_k", 0)), 0)
    except (TypeError, ValueError):
        raise NotRecordedError("The request's sampling settings are no numbers.") from None
    if not 0 < temperature < 1e6 or not 0 < top_p <= 1 or top_k > 1 << 31:
        raise NotRecordedError("Greedy or unusual sampling has no log-probs to learn from.")
    return temperature, top_p, top_k


def _read(answer: bytes) -> tuple[list[int], Completion, Role, NDArray[Any] | None]:
    """Prompt, completion, its role and its experts, out of an answer's JSON."""
    try:
        read = msgspec.json.decode(answer, type=_Answer)
    except msgspec.DecodeError as error:
        raise NotRecordedError(f"The answer is not understood ({error}).") from error
    if len(read.choices) != 1:
        raise NotRecordedError("An answer with one choice can be recorded; ask for n=1.")
    choice = read.choices[0]
    prompt = read.prompt_token_ids or choice.prompt_token_ids
    ids, logprobs = choice.token_ids, _logprobs(choice.logprobs)
    if not prompt or not ids or len(logprobs) != len(ids):
        raise NotRecordedError(
            "The engine gave no token ids with a log-prob each; use one that knows "
            "return_token_ids, such as vLLM."
        )
    finish: FinishReason = {"length": "length", "abort": "aborted"}.get(  # type: ignore[assignment]
        choice.finish_reason or "", "stop"
    )
    spans = _spans(read.farcast, len(ids))
    called = choice.message is not None and bool(choice.message.tool_calls)
    completion = Completion(tuple(ids), tuple(logprobs), spans, finish)
    rows = len(prompt) + len(ids)
    experts = _experts(choice.routed_experts, rows) if choice.routed_experts else None
    return prompt, completion, "tool_call" if called else "model", experts


def _experts(encoded: str, tokens: int) -> NDArray[Any] | None:
    """[tokens or fewer, layers, top_k] out of base64 of an .npy file, as vLLM gives it; None where
    it is of no use."""
    try:
        data = base64.b64decode(encoded, validate=True)
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, MemoryError, SyntaxError):
        return None
    if array.ndim != 3 or array.dtype.kind not in "iu" or not 0 < len(array) <= tokens:
        return None
    layers, top_k = array.shape[1:]
    if not 0 < layers <= MAX_EXPERT_LAYERS or not 0 < top_k <= MAX_EXPERTS_PER_TOKEN:
        return None
    if array.dtype.itemsize > 2 and (int(array.min()) < 0 or int(array.max()) >= 1 << 16):
        return None
    return array.astype("u1" if array.dtype.itemsize == 1 else "<u2")


def _logprobs(given: _Logprobs | None) -> list[float]:
    if given is None:
        return []
    if given.content is not None:
        return [token.logprob for token in given.content]
    return [p for p in given.token_logprobs or () if p is not None]


def _spans(said: _Provenance | None, tokens: int) -> tuple[PolicySpan, ...]:
    if said is None or said.spans is None:
        raise NotRecordedError(
            "Nobody says which version wrote the tokens; put `farcast replica` before the engine."
        )
    if not said.spans:
        return (PolicySpan(0, tokens, said.start.version, said.start.root),)
    spans = tuple(
        PolicySpan(s.start, min(s.end, tokens), s.version, s.root)
        for s in said.spans
        if s.choice == 0 and s.start < tokens
    )
    if not spans or spans[0].start or spans[-1].end != tokens:
        raise NotRecordedError("The spans of the answer do not cover its tokens.")
    return spans


def _shown_role(request: Mapping[str, Any]) -> Role:
    """What a prompt added since the turn before, by its last message."""
    messages = request.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    said = last.get("role") if isinstance(last, dict) else None
    return "user" if said == "user" else "observation"


class SessionFeedback(Feedback, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Feedback, and the session that it is about."""

    session: Name


def read_feedback(body: bytes) -> SessionFeedback:
    """Feedback from JSON, or `FormatError`."""
    try:
        return msgspec.json.decode(body, type=SessionFeedback)
    except msgspec.DecodeError as error:
        raise FormatError(f"The feedback is not valid ({error}); correct that field.") from error


def read_outcome(body: bytes) -> Outcome:
    """An outcome from JSON, or `FormatError`."""
    try:
        return msgspec.json.decode(body, type=Outcome)
    except msgspec.DecodeError as error:
        raise FormatError(f"The outcome is not valid ({error}); correct that field.") from error
