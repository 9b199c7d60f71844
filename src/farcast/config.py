"""What a run is told, as frozen data. Parsing it imports nothing heavy and touches no file.

Every value is checked when it is read; a wrong one raises `ConfigError` with the field's path.
"""

import math
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from farcast.errors import ConfigError
from farcast.types import Name, VersionRef

Positive = Annotated[int, msgspec.Meta(ge=1)]
Few = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Of what is held in memory together: a slip of the pen must not end as a full one."""
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class SamplingConfig(_Frozen, frozen=True, kw_only=True):
    """How a worker samples. Log-probs are taken under exactly this distribution."""

    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 16
    batch_groups: Few = 2
    """Prompts sampled together; each gives one group."""


class TaskConfig(_Frozen, frozen=True, kw_only=True):
    """A verifiable task: an environment's name, its own parameters, and the prompt around it."""

    name: str = "letters"
    params: dict[str, Any] = {}
    instruction: str = ""
    """Put before each question, in the user's turn."""
    system: str = ""
    """The system turn; the model's own default where it is empty."""
    answer_prefix: str = ""
    """What the model's turn begins with: not sampled, not scored, not in the loss."""
    extract: Literal["text", "last_integer"] = "text"
    """What of an answer is scored: all of its text, or the last integer written in it."""
    max_turns: Few = 16
    """The model's turns after which an episode of several is cut."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)] = 1 << 15
    """Tokens of an episode of several turns, next answer included; the model's context at most."""


ObjectiveName = Literal["dapo", "grpo", "dr_grpo", "tis", "decoupled", "reinforce"]
OptimizerName = Literal["adamw", "muon"]


STORE_PATIENCE = 600.0
"""Seconds: the store is all that the two sides share, so without it there is nowhere to go."""


class LoraConfig(_Frozen, frozen=True, kw_only=True):
    """Adapters beside the linear layers whose name ends in one of `targets`."""

    rank: Positive = 8
    alpha: PositiveFloat = 16.0
    targets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )


class TrainConfig(_Frozen, frozen=True, kw_only=True):
    """Trainer settings. `max_staleness` is in versions; `is_cap` truncates importance weights."""

    steps: Positive = 8
    seed: NonNegative = 0
    objective: ObjectiveName = "dapo"
    """See the table in `farcast.train.objectives`."""
    updates_per_step: Positive = 1
    """Optimizer updates on the same groups, one after the other; they become one version."""
    answer_tokens: Positive = 16
    """What dr_grpo divides by: the longest answer that may be sampled."""
    mask_staleness: NonNegative | None = None
    """Tokens older than this, in versions, stay out of the loss; None keeps every token."""
    optimizer: OptimizerName = "adamw"
    """muon is for the matrices of hidden layers; everything else stays with AdamW."""
    muon_momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    also: Annotated[tuple[Name, ...], msgspec.Meta(max_length=15)] = ()
    """Served formats beside bf16 in which every version is published: docs/formats.md."""
    lora: LoraConfig | None = None
    """Train adapters only, and publish them merged; None trains every weight."""
    learning_rate: PositiveFloat = 1e-5
    warmup_steps: NonNegative = 0
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.99
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    grad_clip: PositiveFloat = 1.0
    group_size: Annotated[int, msgspec.Meta(ge=2, le=4096)] = 8
    groups_per_step: Few = 4
    max_staleness: NonNegative = 4
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    is_cap: PositiveFloat = 2.0
    checkpoint_every: Positive = 10
    anchor_every: Positive = 20
    squash: Annotated[int, msgspec.Meta(ge=2, le=1024)] | None = 4
    """Every 4th version also holds the change from 4 before, every 16th from 16 before, ...: who
    comes back late reads O(log n) objects. None sends single deltas only, as several ranks do."""
    keep_versions: Positive | None = 256
    """Older versions are removed, but none that leads on from where a replica with a lease stands,
    and no object put within the hour. None keeps every version; several ranks do, too."""
    max_backlog_groups: Positive = 8
    """Unread groups per worker before it waits: the backpressure bound."""
    store_patience: NonNegativeFloat = STORE_PATIENCE
    """Seconds the trainer tries again while the store does not answer, before it ends."""


class RunConfig(_Frozen, frozen=True, kw_only=True):
    """Everything that defines a run. Written once, read by the trainer; workers read the store."""

    run_id: Name
    store: str
    model: str
    out: str
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    train: TrainConfig = TrainConfig()
    fork_of: VersionRef | None = None
    """The version of another run that this one began as."""
    signing_key: str | None = None
    """The file with the trainer's secret key, on the trainer's machine."""


class LinkConfig(_Frozen, frozen=True, kw_only=True):
    """An emulated link: `rate` in bytes per second each way, `rtt` in seconds for a round trip."""

    rate: PositiveFloat
    rtt: Annotated[float, msgspec.Meta(ge=0, le=3600)]


_T = TypeVar("_T")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


def parse_link(text: str) -> LinkConfig:
    """Read `100mbit,80ms`: bandwidth each way, then the round-trip time."""
    rate_text, _, delay_text = text.lower().replace(" ", "").partition(",")
    rate, delay = _RATE.fullmatch(rate_text), _DELAY.fullmatch(delay_text)
    if rate is None or delay is None or not _is_link(rate, delay):
        raise ConfigError(
            f"The link {text[:60]!r} is not understood; "
            "write bandwidth and round trip like 100mbit,80ms (1kbit or more, an hour at most)."
        )
    return LinkConfig(rate=_bits(rate) / 8, rtt=_seconds(delay))


def _is_link(rate: re.Match[str], delay: re.Match[str]) -> bool:
    """Whether anything could go over it in a lifetime, and a clock could wait for it."""
    return 1e3 <= _bits(rate) < math.inf and _seconds(delay) <= 3600


def _bits(rate: re.Match[str]) -> float:
    return float(rate[1]) * _BITS[rate[2]]


def _seconds(delay: re.Match[str]) -> float:
    return float(delay[1]) * (1e-3 if delay[2] == "ms" else 1.0)


def decode_config(data: bytes, kind: type[_T]) -> _T:
    """Read a config from JSON, or raise `ConfigError` that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # ValidationError included
        raise ConfigError(
            f"The {kind.__name__} is not valid: {error}; correct that field."
        ) from error


def encode_config(config: msgspec.Struct) -> bytes:
    """Write a config as indented JSON with a fixed field order."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2)
