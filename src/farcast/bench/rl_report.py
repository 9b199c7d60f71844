"""All that `farcast bench rl` found, as one flat record and as tables."""

from collections.abc import Iterator

import msgspec

from farcast.bench.rl_delivery import DeliveryReport
from farcast.bench.rl_training import TrainingReport
from farcast.bench.rl_wire import WireReport
from farcast.bench.suite import Machine

BLOCKED_BOUND = 0.02
TOKENS_BOUND = 0.97


def flat(
    machine: Machine,
    delivery: DeliveryReport,
    wire: WireReport,
    training: TrainingReport,
    link: str,
) -> dict[str, object]:
    """One level of names; the machine and the single runs below it."""
    found: dict[str, object] = {"link": link}
    for part in (delivery, wire, training):
        found |= msgspec.to_builtins(part)
    return {**found, "machine": msgspec.to_builtins(machine)}


def lines(
    delivery: DeliveryReport, wire: WireReport, training: TrainingReport
) -> Iterator[tuple[str, str, str]]:
    """What, how much, and what it is compared with."""
    kills = (
        f"{delivery.kills_of_workers} kills of workers, {delivery.kills_of_trainer} of the trainer"
    )
    yield "acknowledged", f"{delivery.acknowledged:,}", kills
    yield "consumed + stale", f"{delivery.consumed:,} + {delivery.stale:,}", ""
    yield "lost", str(delivery.lost), "0"
    yield "duplicated", str(delivery.duplicated), "0"
    others = (
        f"JSON {wire.bytes_per_token_json:.2f}, "
        f"msgpack + zstd {wire.bytes_per_token_msgpack_zstd:.2f}"
    )
    yield "bytes per token", f"{wire.bytes_per_token:.2f}", others
    size = f"of {wire.wire_tokens} tokens, {wire.wire_model}"
    yield "submitted per second", f"{wire.submit_per_s:,.0f}", size
    yield "consumed per second", f"{wire.consume_per_s:,.0f}", size
    blocked = f"at most {BLOCKED_BOUND:.0%}"
    yield "trainer blocked", f"{training.trainer_blocked_fraction:.2%}", blocked
    ratio = training.tokens_per_s_linked_over_free
    yield "tokens/s, linked over free", f"{ratio:.1%}", f"at least {TOKENS_BOUND:.0%}"
    yield (
        "reward, linked - free",
        f"{training.curve_gap:+.3f}",
        f"spread {training.curve_spread:.3f}",
    )
