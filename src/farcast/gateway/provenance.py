"""Which version wrote an answer: what is said about it, in headers, body and stream. Pure.

Three cases, told apart by `spans`:

    no commit fell inside               spans []     every token is of `start`, which is `end`
    one did, and the engine told        spans [...]  which tokens of which choice are of which
    one did, and the engine can't tell  spans null   only that the versions lie in start..end

`start` is the version under which the request was let in, and whose cached prefixes it may have
met. A request that waited inside the engine while a commit passed can be written by one version
on a prefix of the one before: then the spans begin with a later version than `start`.

The engine's word is checked: a label that names no version which this replica has served is an
error, since then the weights are not what the gate thinks they are.
"""

from collections.abc import Callable, Iterable

import msgspec

from farcast.errors import IntegrityError
from farcast.types import VersionRef

FIELD = "farcast"
START = "X-Farcast-Version-Start"
END = "X-Farcast-Version-End"
ROOT_START = "X-Farcast-Root-Start"
ROOT_END = "X-Farcast-Root-End"
SPANS = "X-Farcast-Spans"
RUN = "X-Farcast-Run"


class At(msgspec.Struct, frozen=True):
    version: int
    root: str


class ChoiceSpan(msgspec.Struct, frozen=True):
    """Tokens start <= i < end of a choice were written by a version."""

    choice: int
    start: int
    end: int
    version: int
    root: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The field `farcast` of an answer."""

    run_id: str
    start: At
    end: At
    spans: tuple[ChoiceSpan, ...] | None = ()


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int = 0
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_ANSWER = msgspec.json.Decoder(_Answer)
_ENCODER = msgspec.json.Encoder()

MENTION = b'"weight_versions"'
"""Only a chunk with this in it can hold spans."""

Reported = list[tuple[int, _Span]]
Known = Callable[[str], VersionRef | None]


def reported_spans(answer: bytes) -> Reported:
    """Spans by choice, as an engine's answer or one event of its stream tells them."""
    if MENTION not in answer:
        return []
    try:
        choices = _ANSWER.decode(answer).choices
    except msgspec.DecodeError:
        return []
    return [(c.index, span) for c in choices for span in c.weight_versions or ()]


def single(ref: VersionRef) -> Provenance:
    """No commit fell inside."""
    at = At(ref.version, ref.root)
    return Provenance(run_id=ref.run_id, start=at, end=at)


def crossed(start: VersionRef, end: VersionRef, reported: Reported, known: Known) -> Provenance:
    """A commit may have fallen inside; `known` tells the version that was served under a label."""
    spans = tuple(_checked(reported, known))
    first, last = At(start.version, start.root), At(end.version, end.root)
    if not spans:
        return Provenance(run_id=start.run_id, start=first, end=last, spans=None)
    last = At(spans[-1].version, spans[-1].root)
    if all(span.root == start.root for span in spans):  # the commit came after the last token
        return Provenance(run_id=start.run_id, start=first, end=first)
    return Provenance(run_id=start.run_id, start=first, end=last, spans=spans)


def check(reported: Reported, ref: VersionRef, known: Known) -> None:
    """Raise `IntegrityError` unless the engine says that `ref` wrote everything."""
    for span in _checked(reported, known):
        if span.root != ref.root:
            raise _stranger(f"version {span.version}, not {ref.version},")


def headers(said: Provenance) -> dict[str, str]:
    """The same for clients that look at headers only."""
    named = {
        RUN: said.run_id,
        START: str(said.start.version),
        END: str(said.end.version),
        ROOT_START: said.start.root,
        ROOT_END: said.end.root,
    }
    if said.spans:
        named[SPANS] = ",".join(f"{s.choice}:{s.start}-{s.end}={s.version}" for s in said.spans)
    elif said.spans is None:
        named[SPANS] = "unknown"
    return named


def start_headers(ref: VersionRef) -> dict[str, str]:
    """What can be said before an answer begins."""
    return {RUN: ref.run_id, START: str(ref.version), ROOT_START: ref.root}


def encode(said: Provenance) -> bytes:
    return _ENCODER.encode(said)


def _checked(reported: Reported, known: Known) -> Iterable[ChoiceSpan]:
    for choice, span in reported:
        ref = known(span.version)
        if ref is None:
            raise _stranger("weights that it labels otherwise than this replica's versions")
        if span.end > span.start:
            yield ChoiceSpan(choice, span.start, span.end, ref.version, ref.root)


def _stranger(what: str) -> IntegrityError:
    return IntegrityError(
        f"The engine says that {what} wrote this answer; the answer was withheld, and the "
        "replica looks at the engine again."
    )
