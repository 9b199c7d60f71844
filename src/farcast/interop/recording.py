"""Trajectories from interactions that are not ours to run: a harness asks an OpenAI-compatible
endpoint, and what passed becomes training data once somebody says how it ended.

The engine's own token ids and log-probs are kept; text is never encoded again. Requests of one
session are the turns of one episode, as long as each prompt begins with every token so far. Where
one does not (a template that drops earlier thoughts, a tokenizer that reads its own output
another way), a new segment begins and says so in its metadata (`drift`): training on tokens that
the model never saw together would be worse than a cut.

Refuses, with a reason and without touching the answer: what has no token ids or log-probs, greedy
sampling, several choices, and tokens of which nobody can say which version wrote them.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from farcast.engines.base import Completion, FinishReason
from farcast.errors import FarcastError, FormatError, TrajectoryError
from farcast.rollout import Episode
from farcast.trajectory import Role, Trajectory, TrajectorySender
from farcast.trajectory.wire import MAX_TOKENS
from farcast.types import NAME_PATTERN, Name, PolicySpan

MAX_SESSIONS = 4096
IDLE_SECONDS = 3600.0
"""A session of which nothing was heard for so long has no outcome to come."""

_ASKED_FOR: Mapping[str, Any] = {"return_token_ids": True}


class NotRecordedError(TrajectoryError):
    """An interaction cannot become training data; the message says why."""


class Feedback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was said of a turn, later. `turn` counts the model's turns from 0."""

    turn: Annotated[int, msgspec.Meta(ge=0)]
    text: Annotated[str, msgspec.Meta(max_length=1 << 14)]


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


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    farcast: _Provenance | None = None


class _Session:
    """The segments of one episode; the last one still grows."""

    def __init__(self, now: float) -> None:
        self.heard = now
        self.segments: list[Episode] = [Episode()]
        self.drifts: dict[int, str] = {}
        self.sampling: tuple[float, float, int] | None = None
        self.finish: FinishReason = "stop"


class Recorder:
    """Holds open sessions, and sends each home with its outcome. Safe for several threads."""

    def __init__(
        self,
        sender: TrajectorySender,
        *,
        engine: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender = sender
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self.recorded = self.refused = self.forgotten = 0

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

    def attach(self, outcome: Outcome) -> list[str]:
        """Close a session with its outcome; durable on return. The ids of its trajectories.

        An error of the store leaves the session open: attach again."""
        with self._lock:
            session = self._sessions.get(outcome.session)
        if session is None:
            raise NotRecordedError(
                f"There is no open session {outcome.session}; it was never recorded, was closed "
                "with its outcome before, or was idle for too long."
            )
        trajectories = self._trajectories(session, outcome)
        self._sender.submit_many(trajectories)
        with self._lock:
            self._sessions.pop(outcome.session, None)
        return [trajectory.id for trajectory in trajectories]

    def _record(self, name: str, request: Mapping[str, Any], answer: bytes, started: float) -> None:
        if NAME_PATTERN.fullmatch(name) is None or len(name) > 100:
            raise NotRecordedError(
                "A session's name has at most 100 letters, digits, '.', '_' or '-'; rename it."
            )
        sampling = _sampling(request)
        prompt, completion, role = _read(answer)
        with self._lock:
            session = self._session(name)
            if session.sampling not in (None, sampling):
                raise NotRecordedError(
                    "A session keeps one temperature, top_p and top_k; begin another session."
                )
            episode = session.segments[-1]
            held = len(episode.token_ids)
            if max(held, len(prompt)) + len(completion.token_ids) > MAX_TOKENS:
                raise NotRecordedError(f"The session is longer than {MAX_TOKENS} tokens; end it.")
            shown: Role = _shown_role(request) if held else "user"
            try:
                episode.show_prompt(prompt, shown)
            except FormatError as error:
                episode = Episode()
                episode.show(prompt, "user")
                session.segments.append(episode)
                session.drifts[len(session.segments) - 1] = str(error)[:200]
            episode.sampled(completion, role, started=started, ended=time.time())
            session.sampling, session.finish = sampling, completion.finish_reason

    def _session(self, name: str) -> _Session:
        """The session, as the one heard of last; old ones go."""
        now = self._clock()
        session = self._sessions.pop(name, None) or _Session(now)
        session.heard = now
        self._sessions[name] = session
        while len(self._sessions) > MAX_SESSIONS or self._oldest_idle(now):
            self._sessions.popitem(last=False)
            self.forgotten += 1
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
        notes = {f"feedback/{f.turn}": f.text for f in outcome.feedback}
        made = []
        for number in numbers:
            episode = session.segments[number]
            drift = session.drifts.get(number)
            made.append(
                Trajectory(
                    id=f"{outcome.session}-{number}",
                    group_id=group,
                    group_size=size,
                    worker_id=self._sender.worker_id,
                    token_ids=tuple(episode.token_ids),
                    logprobs=tuple(episode.logprobs),
                    loss_mask=tuple(episode.loss_mask),
                    spans=tuple(episode.spans),
                    turns=tuple(episode.turns),
                    reward=outcome.reward,
                    rewards=outcome.rewards,
                    finish_reason="aborted" if outcome.aborted else session.finish,
                    task=outcome.task,
                    seed=outcome.seed,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    engine=self._engine,
                    metadata={
                        **outcome.metadata,
                        **notes,
                        **({"drift": drift} if drift else {}),
                    },
                )
            )
        return made


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


def _read(answer: bytes) -> tuple[list[int], Completion, Role]:
    """Prompt, completion and its role, out of an answer's JSON."""
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
    return prompt, completion, "tool_call" if called else "model"


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


def read_outcome(body: bytes) -> Outcome:
    """An outcome from JSON, or `FormatError`."""
    try:
        return msgspec.json.decode(body, type=Outcome)
    except msgspec.DecodeError as error:
        raise FormatError(f"The outcome is not valid ({error}); correct that field.") from error
