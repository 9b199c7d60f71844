"""What somebody says of a session that was recorded: feedback on its turns, and how it ended."""

from typing import Annotated

import msgspec
from blake3 import blake3

from farcast.errors import FormatError
from farcast.trajectory.wire import MAX_FEEDBACK
from farcast.types import Name


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
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    aborted: bool = False
    feedback: tuple[Feedback, ...] = ()
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=256)] = {}

    def digest(self) -> str:
        """Equal for outcomes that say the same."""
        return blake3(msgspec.json.encode(self, order="deterministic")).hexdigest()


class SessionFeedback(Feedback, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Feedback, and the session that it is about."""

    session: Name


def read_feedback(body: bytes) -> SessionFeedback:
    """Feedback from JSON, or `FormatError`."""
    try:
        return msgspec.json.decode(body, type=SessionFeedback)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"The feedback is not valid ({error}); correct that field.") from error


def read_outcome(body: bytes) -> Outcome:
    """An outcome from JSON, or `FormatError`."""
    try:
        return msgspec.json.decode(body, type=Outcome)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"The outcome is not valid ({error}); correct that field.") from error


def checked(outcome: Outcome) -> Outcome:
    """The same outcome, as it would come from JSON, or `FormatError`: nothing checks the types of
    one that was made in this process."""
    try:
        body = msgspec.json.encode(outcome)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(f"The outcome is not valid ({error}); correct that field.") from error
    return read_outcome(body)
