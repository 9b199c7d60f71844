"""Every type that travels home, in one file.

Producer: workers (`rollout`, through `TrajectorySender`). Consumer: the trainer
(`train`, through `TrajectoryReceiver`). Token ids are those that were sampled; nothing is
ever re-tokenised. Log-probs are natural logs under the sampling distribution.

The exact prompt of each of the model's turns is in the record: it is every token before that turn
(`Trajectory.prompt_of`).
"""

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from farcast.errors import FormatError
from farcast.types import Name, PolicySpan

Role = Literal["system", "user", "model", "tool_call", "observation", "feedback"]
FinishReason = Literal["stop", "length", "aborted"]

SAID_BY_MODEL: tuple[Role, ...] = ("model", "tool_call")

MAX_TOKENS = 1 << 22
"""Tokens of one trajectory: 4 Mi is beyond every context window in use."""

MAX_TURNS = 1 << 14

MAX_EXPERT_LAYERS = 1 << 10
MAX_EXPERTS_PER_TOKEN = 1 << 8
"""Above every mixture-of-experts model in use, by a factor of four or more."""

MAX_FEEDBACK = 1 << 14
"""Characters that may be said of one turn."""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Turn(_Wire, frozen=True, kw_only=True):
    """Tokens `start <= i < end` of the trajectory, said by `role`.

    `started` and `ended` are seconds since the epoch by the worker's clock: an interaction
    with a real harness cannot be replayed, so its times are part of the record. `feedback` is what
    was said of the turn afterwards, for hindsight methods; it is in no prompt. Feedback that the
    model was shown is a turn of its own, with that role.
    """

    role: Role
    start: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]
    started: float = 0.0
    ended: float = 0.0
    feedback: Annotated[str, msgspec.Meta(max_length=MAX_FEEDBACK)] = ""


class RoutedExperts(_Wire, frozen=True, kw_only=True):
    """Which experts each layer of a mixture of experts sent the first tokens of a trajectory to.

    `ids` is an array [tokens, layers, top_k] in C order, little endian, `width` bytes each, in the
    engine's order of preference. Engines do not know it of the last sampled token, which no
    forward pass has read, so it may have fewer tokens than the trajectory.
    """

    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERT_LAYERS)]
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS_PER_TOKEN)]
    width: Annotated[int, msgspec.Meta(ge=1, le=2)]
    ids: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> "RoutedExperts":
        """From unsigned integers [tokens, layers, top_k] of one or two bytes."""
        if not isinstance(array, np.ndarray) or array.dtype not in (np.uint8, np.uint16):
            raise FormatError("Routed experts are unsigned integers of one or two bytes.")
        if array.ndim != 3 or not _is_shape(*array.shape[1:]):
            raise FormatError("Routed experts are [tokens, layers, top_k]; give that shape.")
        width = array.dtype.itemsize
        ids = np.ascontiguousarray(array, dtype=f"<u{width}").tobytes()
        return cls(layers=array.shape[1], top_k=array.shape[2], width=width, ids=ids)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.width

    @property
    def tokens(self) -> int:
        return len(self.ids) // self.row_bytes

    def array(self) -> NDArray[Any]:
        """Read-only unsigned integers [tokens, layers, top_k]."""
        flat = np.frombuffer(self.ids, f"<u{self.width}")
        return flat.reshape(-1, self.layers, self.top_k)


def _is_shape(layers: int, top_k: int) -> bool:
    return 1 <= layers <= MAX_EXPERT_LAYERS and 1 <= top_k <= MAX_EXPERTS_PER_TOKEN


class Trajectory(_Wire, frozen=True, kw_only=True):
    """One episode.

    `token_ids`, `logprobs` and `loss_mask` have one entry per token, prompt included;
    `logprobs` is 0.0 and `loss_mask` False where the token was not sampled.
    `spans` are in token coordinates and cover every token whose mask is True.
    `group_id` joins the trajectories that share a prompt (GRPO); `group_size` says how many
    there were to be.
    """

    id: Name
    group_id: Name
    group_size: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    worker_id: Name
    token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKENS)]
    logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_TOKENS)]
    loss_mask: Annotated[tuple[bool, ...], msgspec.Meta(max_length=MAX_TOKENS)]
    spans: Annotated[tuple[PolicySpan, ...], msgspec.Meta(max_length=MAX_TURNS)]
    turns: Annotated[tuple[Turn, ...], msgspec.Meta(max_length=MAX_TURNS)]
    reward: float
    rewards: dict[str, float] = {}
    """Named parts of the reward, where the environment gives them."""
    finish_reason: FinishReason
    task: str = ""
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    engine: str = ""
    metadata: dict[str, str] = {}
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    """How many tokens could be drawn; 0 where all could."""
    experts: RoutedExperts | None = None
    """For trainers that replay the engine's routing; None where nobody recorded it."""

    @property
    def model_turns(self) -> tuple[Turn, ...]:
        """The turns that the model wrote, in order: what feedback and hindsight count."""
        return tuple(turn for turn in self.turns if turn.role in SAID_BY_MODEL)

    def prompt_of(self, turn: Turn) -> tuple[int, ...]:
        """The token ids that the engine was given to write `turn`."""
        return self.token_ids[: turn.start]
