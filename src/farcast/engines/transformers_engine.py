"""An engine in this process: a `transformers` module that follows a run while it samples.

A version is staged in a background thread and committed between two token steps (in place):
answers on their way go on, and their spans say which version wrote which tokens. Keys and values
that the old version computed stay in the cache of those answers, as in-flight updates do
elsewhere; the log-probs are those of the distribution that was really sampled. Nothing is kept
between two calls of `generate`, so no later answer sees them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Literal

import msgspec

from farcast.config import SamplingConfig
from farcast.engines.base import Completion, FinishReason
from farcast.engines.decoding import Row, decode
from farcast.engines.following import Commit, Follower
from farcast.engines.gate import Gate
from farcast.errors import UnknownVersionError
from farcast.replica import Subscriber
from farcast.types import PolicySpan, VersionRef


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for people. Rates are since the engine was started."""

    version: VersionRef | None
    state: Literal["joining", "serving", "staging", "failed"]
    tokens: int
    tokens_per_second: float
    commits: int
    longest_pause_seconds: float


class TransformersEngine:
    """Samples from `module`, which the subscriber's target wraps. One caller generates at a time.

    `eos_ids` end an answer. `on_commit` runs in the following thread after each commit.
    """

    def __init__(
        self,
        module: Any,
        subscriber: Subscriber,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        poll_seconds: float = 0.5,
        on_commit: Callable[[Commit], None] = lambda _: None,
    ) -> None:
        self._module = module.eval()
        self._subscriber = subscriber
        self._eos_ids = frozenset(eos_ids)
        self._pad_id = pad_id
        self._gate = Gate()
        self._on_commit = on_commit
        self._follower = Follower(
            subscriber, self._gate.commit, poll_seconds=poll_seconds, on_commit=self._committed
        )
        self._tokens = 0
        self._seconds = 0.0
        self._commits = 0
        self._longest_pause = 0.0

    @property
    def version(self) -> VersionRef | None:
        return self._subscriber.ref

    def start(self) -> None:
        """Begin to follow the run."""
        self._follower.start()

    def close(self) -> None:
        """Stop following; the module stays at its version."""
        self._follower.close()

    def check(self) -> None:
        """Raise what made this engine unfit to serve, if anything did."""
        failure = self._follower.failure
        if failure is not None:
            raise failure

    def status(self) -> EngineStatus:
        version = self.version
        state: Literal["joining", "serving", "staging", "failed"] = "serving"
        if self._follower.failure is not None:
            state = "failed"
        elif version is None:
            state = "joining"
        elif self._follower.staging:
            state = "staging"
        return EngineStatus(
            version=version,
            state=state,
            tokens=self._tokens,
            tokens_per_second=self._tokens / self._seconds if self._seconds else 0.0,
            commits=self._commits,
            longest_pause_seconds=self._longest_pause,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seed: int
    ) -> list[Completion]:
        began = time.perf_counter()
        rows = decode(
            self._module,
            prompts,
            sampling,
            eos_ids=self._eos_ids,
            pad_id=self._pad_id,
            seed=seed,
            step=self._step,
        )
        self._seconds += time.perf_counter() - began
        self._tokens += sum(len(row.token_ids) for row in rows)
        return [_completion(row) for row in rows]

    @contextmanager
    def _step(self) -> Iterator[VersionRef]:
        """Around a forward pass: the version inside cannot change."""
        with self._gate.step():
            self.check()
            version = self.version
            if version is None:
                raise UnknownVersionError(
                    "The engine has no verified version yet; wait until it has."
                )
            yield version

    def _committed(self, commit: Commit) -> None:
        self._commits += 1
        if self._commits > 1:  # the first one had nothing to interrupt
            self._longest_pause = max(self._longest_pause, commit.pause_seconds)
        self._on_commit(commit)


def _completion(row: Row) -> Completion:
    reason: FinishReason = "stop" if row.ended else "length"
    return Completion(
        token_ids=tuple(row.token_ids),
        logprobs=tuple(row.logprobs),
        spans=spans_of(row.versions),
        finish_reason=reason,
    )


def spans_of(versions: Sequence[VersionRef]) -> tuple[PolicySpan, ...]:
    """The version of each token, as spans."""
    spans, start = [], 0
    for ref, same in groupby(versions):
        end = start + len(list(same))
        spans.append(PolicySpan(start, end, ref.version, ref.root))
        start = end
    return tuple(spans)
