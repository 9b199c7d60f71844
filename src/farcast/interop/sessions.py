"""A session that is recorded: its turns as they come, and the trajectories that they make. Pure.

A session takes in no more than its trajectories may hold, so that whatever was recorded can go
home; what an outcome adds to them is judged when it comes. Its trajectories' ids hold a name that
it was given once (`life`), so that they are those of no other session, also of one with the same
name at another recorder.
"""

import secrets
import threading
from collections.abc import Mapping

import msgspec
import numpy as np

from farcast.engines.base import Completion, FinishReason
from farcast.errors import FormatError
from farcast.interop.answers import NotRecordedError
from farcast.interop.outcomes import Feedback, Outcome
from farcast.rollout import Episode
from farcast.trajectory import Role, Trajectory
from farcast.trajectory.encoding import MAX_BODY_BYTES
from farcast.trajectory.header import MAX_HEADER_BYTES
from farcast.trajectory.wire import MAX_FEEDBACK, MAX_TOKENS, MAX_TURNS, SAID_BY_MODEL

MAX_SEGMENTS = 1 << 14
"""Cuts of one session: as many as a trajectory may have turns."""

MAX_SESSION_TOKENS = 1 << 24
"""Of all segments: they take about 900 MB while the session is open."""

MAX_SESSION_FEEDBACK = 1 << 22
"""Bytes. A quarter of what a header may have: with the turns it always fits."""

_TOKEN_BYTES = 8
"""Id and log-prob of one token, at most."""


class Step(msgspec.Struct, frozen=True, array_like=True):
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


class Entry(msgspec.Struct, frozen=True):
    """What is noted of a session: one of the first three at a time. With an outcome comes which
    worker began to send it, and `since`, the number of that worker's first batch that may hold it.
    `life` is in the first entry."""

    step: Step | None = None
    feedback: Feedback | None = None
    outcome: Outcome | None = None
    worker: str = ""
    since: int = 0
    life: str = ""


class Session:
    """The segments of one episode; the last one still grows. Used under its lock."""

    def __init__(self, now: float) -> None:
        self.heard = now
        self.lock = threading.Lock()
        self.life = secrets.token_hex(6)
        self.is_noted = False
        self.segments: list[Episode] = [Episode()]
        self.drifts: dict[int, str] = {}
        self.sampling: tuple[float, float, int] | None = None
        self.finish: FinishReason = "stop"
        self.feedback: list[Feedback] = []
        self.outcome: Outcome | None = None
        self.worker, self.since = "", 0
        self.was_cut_off = False
        """Whether a recorder that ended held the outcome already, and may have sent it."""

    def apply(self, entry: Entry) -> None:
        self.is_noted = True
        if entry.life:
            self.life = entry.life
        if entry.step is not None:
            self._take(entry.step)
        if entry.feedback is not None:
            self.feedback.append(entry.feedback)
        if entry.outcome is not None:
            self.outcome = entry.outcome
            self.worker, self.since = entry.worker, entry.since

    def check_step(self, step: Step) -> Step:
        """The step as it can be taken in: without its experts where they are too many. Raises
        `NotRecordedError` where there is no room for it."""
        if self.sampling not in (None, step.sampling):
            raise NotRecordedError(
                "A session keeps one temperature, top_p and top_k; begin another session."
            )
        segment = Episode() if step.drift is not None else self.segments[-1]
        added = len(step.shown) + len(step.completion.token_ids)
        tokens = len(segment.token_ids) + added
        if tokens > MAX_TOKENS or self.tokens + added > MAX_SESSION_TOKENS:
            raise NotRecordedError(f"The session is longer than {MAX_TOKENS} tokens; end it.")
        spans = len(segment.spans) + len(step.completion.spans)
        if max(len(segment.turns) + 2, spans) > MAX_TURNS:
            raise NotRecordedError(f"The session has over {MAX_TURNS} turns; end it.")
        if step.drift is not None and len(self.segments) >= MAX_SEGMENTS:
            raise NotRecordedError(
                f"The session begins anew for the {MAX_SEGMENTS}th time; end it."
            )
        room = MAX_BODY_BYTES - MAX_HEADER_BYTES - tokens * _TOKEN_BYTES
        if step.experts is not None and len(step.experts[2]) > room:
            step = msgspec.structs.replace(step, experts=None)
        return step

    def check_feedback(self, feedback: Feedback) -> bool:
        """Whether it is new; `FormatError` where there is no such turn or no room for it."""
        if feedback.turn >= self.turns:
            raise FormatError(f"The session has {self.turns} turns of the model; name one, from 0.")
        said = [f.text for f in self.feedback if f.turn == feedback.turn]
        if feedback.text in said:
            return False
        held = sum(len(f.text.encode()) for f in self.feedback)
        if (
            len("\n".join([*said, feedback.text])) > MAX_FEEDBACK
            or held + len(feedback.text.encode()) > MAX_SESSION_FEEDBACK
        ):
            raise FormatError(
                f"A turn takes {MAX_FEEDBACK} characters of feedback, a session "
                f"{MAX_SESSION_FEEDBACK} bytes; shorten it."
            )
        return True

    @property
    def tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def turns(self) -> int:
        """The model's turns so far."""
        return sum(map(_turns_of, self.segments))

    def trajectories(self, outcome: Outcome, *, worker_id: str, engine: str) -> list[Trajectory]:
        """Without a group, the segments are one; in a group, each session has one place, and the
        last segment, whose prompt shows all before it, takes it."""
        numbers = list(range(len(self.segments)))
        name = f"{outcome.session}-{self.life}"
        size, group = len(numbers), outcome.group_id or name
        if outcome.group_id is not None:
            numbers, size = numbers[-1:], outcome.group_size
        temperature, top_p, top_k = self.sampling or (1.0, 1.0, 0)
        said = self._feedback(outcome)
        made = []
        for number in numbers:
            drift = self.drifts.get(number)
            first = sum(map(_turns_of, self.segments[:number]))
            trajectory = self.segments[number].trajectory(
                id=f"{name}-{number}",
                group_id=group,
                group_size=size,
                worker_id=worker_id,
                reward=outcome.reward,
                rewards=outcome.rewards,
                finish_reason="aborted" if outcome.aborted else self.finish,
                task=outcome.task,
                seed=outcome.seed,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                engine=engine,
                metadata={**outcome.metadata, **({"drift": drift} if drift else {})},
            )
            made.append(_told(trajectory, said, first))
        return made

    def _take(self, step: Step) -> None:
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

    def _feedback(self, outcome: Outcome) -> dict[int, str]:
        said: dict[int, list[str]] = {}
        for feedback in (*self.feedback, *outcome.feedback):
            if feedback.turn >= self.turns:
                raise FormatError(f"The session has no turn {feedback.turn} of the model.")
            texts = said.setdefault(feedback.turn, [])
            if feedback.text not in texts:
                texts.append(feedback.text)
        return {turn: "\n".join(texts)[:MAX_FEEDBACK] for turn, texts in said.items()}


def _turns_of(segment: Episode) -> int:
    return sum(turn.role in SAID_BY_MODEL for turn in segment.turns)


def _told(trajectory: Trajectory, said: Mapping[int, str], first: int) -> Trajectory:
    """With the feedback on its turns, of which the first of the model's has number `first`."""
    turns, number = [], first
    for turn in trajectory.turns:
        if turn.role in SAID_BY_MODEL:
            turn = msgspec.structs.replace(turn, feedback=said.get(number, ""))
            number += 1
        turns.append(turn)
    return msgspec.structs.replace(trajectory, turns=tuple(turns))
