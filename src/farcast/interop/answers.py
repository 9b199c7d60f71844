"""What an OpenAI-compatible engine's answer says to who wants to learn from it: token ids, their
log-probs, the versions that wrote them, the experts they were routed to.

Refuses, with a reason (`NotRecordedError`): what has no token ids or log-probs, greedy sampling,
several choices, tokens of which nobody can say which version wrote them, and whatever no reader of
trajectories would take: an engine is believed only as far as its answer can be checked.
"""

import base64
import io
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farcast.engines.base import Completion, FinishReason
from farcast.errors import TrajectoryError
from farcast.trajectory import Role
from farcast.trajectory.checks import LOGPROB_SLACK, MAX_TOKEN_ID
from farcast.trajectory.wire import MAX_EXPERT_LAYERS, MAX_EXPERTS_PER_TOKEN
from farcast.types import MAX_VERSION, Digest, PolicySpan

ASKED_FOR: Mapping[str, Any] = {"return_token_ids": True}

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
_Logprob = Annotated[float, msgspec.Meta(ge=-3.4e38, le=LOGPROB_SLACK)]
"""Finite as float32, which is how it travels."""
_Messages = list[msgspec.Raw] | None
_Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


class NotRecordedError(TrajectoryError):
    """An interaction cannot become training data; the message says why."""


class Said(NamedTuple):
    """`experts` is [tokens or fewer, layers, top_k]; None where the engine tells none."""

    prompt: list[int]
    completion: Completion
    role: Role
    experts: NDArray[Any] | None


class _At(msgspec.Struct):
    version: _Version
    root: Digest


class _Span(msgspec.Struct):
    start: int
    end: int
    version: _Version
    root: Digest
    choice: int = 0


class Provenance(msgspec.Struct):
    """Which versions wrote an answer, as a sidecar says it."""

    start: _At
    spans: list[_Span] | None = []


class Token(msgspec.Struct):
    """Of a chat, with its log-prob."""

    logprob: _Logprob


class Logprobs(msgspec.Struct):
    """Of a chat in `content`, else in `token_logprobs`."""

    content: list[Token] | None = None
    token_logprobs: list[_Logprob | None] | None = None


class Message(msgspec.Struct):
    """Whether a tool was called."""

    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    """Of an answer, or of an event that brings a piece of it."""

    finish_reason: str | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None
    logprobs: Logprobs | None = None
    message: Message | None = None
    routed_experts: str | None = None


class Answer(msgspec.Struct):
    """All of an answer that is looked at; other fields are passed over. `problem` is why one that
    was put together out of a stream is none."""

    choices: list[Choice]
    prompt_token_ids: list[_TokenId] | None = None
    farcast: Provenance | None = None
    problem: str = ""


class Asked(NamedTuple):
    """A request as it is sent on, and what the recorder reads of it; None where it cannot."""

    body: bytes
    settings: dict[str, Any] | None


def asking_for_tokens(path: str, body: bytes) -> Asked:
    """A request as it has to be asked so that its answer can be recorded. Nothing else in it is
    touched, and one that is not understood passes as it came: to judge it is the engine's."""
    more = {"logprobs": True} if path.endswith("/chat/completions") else {"logprobs": 1}
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        settings: dict[str, Any] = {
            name: msgspec.json.decode(fields[name])
            for name in ("temperature", "top_p", "top_k")
            if name in fields
        }
        messages = msgspec.json.decode(fields.get("messages", b"null"), type=_Messages)
        if messages:
            settings["messages"] = [msgspec.json.decode(messages[-1])]
        return Asked(msgspec.json.encode({**fields, **ASKED_FOR, **more}), settings)
    except (ValueError, RecursionError):
        return Asked(body, None)


def sampling_of(request: Mapping[str, Any]) -> tuple[float, float, int]:
    """temperature, top_p and top_k (0: all)."""
    asked = {name: value for name, value in request.items() if value is not None}
    try:
        temperature, top_p = (float(asked.get(name, 1.0)) for name in ("temperature", "top_p"))
        top_k = max(int(asked.get("top_k", 0)), 0)
    except (TypeError, ValueError, OverflowError):
        raise NotRecordedError("The request's sampling settings are no numbers.") from None
    if not 0 < temperature < 1e6 or not 0 < top_p <= 1 or top_k > 1 << 31:
        raise NotRecordedError("Greedy or unusual sampling has no log-probs to learn from.")
    return temperature, top_p, top_k


def read_answer(answer: bytes) -> Said:
    """Out of an answer's JSON."""
    try:
        read = msgspec.json.decode(answer, type=Answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotRecordedError(f"The answer is not understood ({error}).") from error
    if read.problem:
        raise NotRecordedError(f"The stream cannot be recorded: {read.problem}.")
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
    return Said(prompt, completion, "tool_call" if called else "model", experts)


def _experts(encoded: str, tokens: int) -> NDArray[Any] | None:
    """[tokens or fewer, layers, top_k] out of base64 of an .npy file, as vLLM gives it; None where
    it is of no use."""
    try:
        data = base64.b64decode(encoded, validate=True)
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception:  # noqa: BLE001 - numpy reads the header as Python, and raises what that does
        return None
    if array.ndim != 3 or array.dtype.kind not in "iu" or not 0 < len(array) <= tokens:
        return None
    layers, top_k = array.shape[1:]
    if not 0 < layers <= MAX_EXPERT_LAYERS or not 0 < top_k <= MAX_EXPERTS_PER_TOKEN:
        return None
    if array.dtype.itemsize > 2 and (int(array.min()) < 0 or int(array.max()) >= 1 << 16):
        return None
    return array.astype("u1" if array.dtype.itemsize == 1 else "<u2")


def _logprobs(given: Logprobs | None) -> list[float]:
    if given is None:
        return []
    if given.content is not None:
        return [token.logprob for token in given.content]
    return [p for p in given.token_logprobs or () if p is not None]


def _spans(said: Provenance | None, tokens: int) -> tuple[PolicySpan, ...]:
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
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), tokens]
    if starts != ends or any(span.start >= span.end for span in spans):
        raise NotRecordedError(
            "The spans of the answer do not cover its tokens, each once and in order."
        )
    return spans


def shown_role(request: Mapping[str, Any]) -> Role:
    """What a prompt added since the turn before, by its last message."""
    messages = request.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    said = last.get("role") if isinstance(last, dict) else None
    return "user" if said == "user" else "observation"
