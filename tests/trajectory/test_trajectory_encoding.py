"""Whatever the bytes, decoding returns exactly what was encoded or raises one of three errors."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farcast.errors import FormatError, IntegrityError, LimitError, TrajectoryTooLargeError
from farcast.trajectory import (
    RoutedExperts,
    Trajectory,
    Turn,
    check_trajectory,
    decode_batch,
    encode_batch,
)
from farcast.trajectory import encoding as enc
from farcast.trajectory.header import MAX_POLICIES
from trajectory_world import RUN, episode, group, span

REFUSALS = (FormatError, LimitError, IntegrityError)

tokens = st.integers(0, 2**31 - 1)
logprob = st.floats(max_value=0.0, width=32, allow_nan=False, allow_infinity=False)
words = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    count = draw(st.integers(1, 40))
    mask = tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    cut = draw(st.integers(1, count))
    spans = [span(0, cut, draw(st.integers(0, 10**12 - 1)))]
    if cut < count:
        spans.append(span(cut, count, draw(st.integers(0, 9))))
    return Trajectory(
        id=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)),
        group_id="g",
        group_size=draw(st.integers(1, 65536)),
        worker_id="w",
        token_ids=tuple(draw(st.lists(tokens, min_size=count, max_size=count))),
        logprobs=tuple(draw(st.lists(logprob, min_size=count, max_size=count))),
        loss_mask=mask,
        spans=tuple(spans),
        turns=(Turn(role="model", start=0, end=count, started=draw(st.floats(0, 1e10))),),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        rewards=draw(st.dictionaries(words, st.floats(-1, 1), max_size=3)),
        finish_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
        task=draw(words),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        metadata=draw(st.dictionaries(words, words, max_size=3)),
    )


@given(st.lists(trajectories(), max_size=5), st.integers(0, 10**12 - 1))
@settings(max_examples=50, deadline=None)
def test_decode_of_encode_is_the_same(batch: list[Trajectory], sequence: int) -> None:
    data = encode_batch(batch, run_id=RUN, sequence=sequence)
    read = decode_batch(data)
    assert read == (RUN, sequence, tuple(batch))
    assert encode_batch(read.trajectories, run_id=RUN, sequence=sequence) == data


def test_log_probs_keep_every_float32_bit() -> None:
    bits = np.array([0x80000000, 0x80000001, 0xBF800001, 0xFF7FFFFF, 0xBF7FFFFF], np.uint32)
    values = tuple(bits.view(np.float32).tolist())
    given_ = episode(prompt=0, answer=5, logprobs=values, turns=())
    (read,) = decode_batch(encode_batch([given_], run_id=RUN, sequence=0)).trajectories
    assert np.array(read.logprobs, np.float32).view(np.uint32).tolist() == bits.tolist()


def test_a_log_prob_that_is_no_float32_becomes_the_nearest() -> None:
    given_ = episode(prompt=0, answer=1, logprobs=(-0.1,), turns=())
    (read,) = decode_batch(encode_batch([given_], run_id=RUN, sequence=0)).trajectories
    assert read.logprobs == (float(np.float32(-0.1)),)


def test_sampled_tokens_outside_the_loss_keep_their_log_probs() -> None:
    given_ = episode(prompt=2, answer=3, loss_mask=(False, False, True, False, True))
    assert decode_batch(encode_batch([given_], run_id=RUN, sequence=0)).trajectories == (given_,)


@pytest.mark.parametrize("largest", [255, 256, 65535, 65536, 1 << 24, 2**31 - 1])
def test_every_width_of_token_ids(largest: int) -> None:
    given_ = episode(prompt=0, answer=3, token_ids=(0, largest, 1))
    assert decode_batch(encode_batch([given_], run_id=RUN, sequence=0)).trajectories == (given_,)


ids_with = (1, 2, 3, 4, 5, 6, 7)
zeros = (0.0,) * 7
BROKEN: dict[str, dict[str, Any]] = {
    "no token": {"token_ids": (), "logprobs": (), "loss_mask": ()},
    "fewer log-probs than tokens": {"logprobs": zeros},
    "fewer mask entries": {"loss_mask": (True,) * 7},
    "negative token id": {"token_ids": (*ids_with, -1)},
    "token id over 31 bits": {"token_ids": (*ids_with, 2**31)},
    "token id over 64 bits": {"token_ids": (*ids_with, 2**70)},
    "fractional token id": {"token_ids": (*ids_with, 8.5)},
    "text for token ids": {"token_ids": ("a",) * 8},
    "nan log-prob": {"logprobs": (*zeros, float("nan"))},
    "infinite log-prob": {"logprobs": (*zeros, float("-inf"))},
    "log-prob beyond float32": {"logprobs": (*zeros, -1e300)},
    "log-prob above zero": {"logprobs": (*zeros, 0.5)},
    "numbers for the mask": {"loss_mask": (0, 0, 0, 1, 1, 1, 1, 1)},
    "prompt token in the loss": {"loss_mask": (True,) * 8, "spans": (span(0, 8, 1),)},
    "uncovered token in the loss": {"spans": (span(3, 7, 1),)},
    "no span": {"spans": ()},
    "overlapping spans": {"spans": (span(3, 6, 1), span(5, 8, 2))},
    "spans out of order": {"spans": (span(5, 8, 1), span(3, 5, 2))},
    "empty span": {"spans": (span(3, 3, 1), span(3, 8, 2))},
    "span beyond the end": {"spans": (span(3, 9, 1),)},
    "span with a bad root": {"spans": (replace(span(3, 8, 1), root="x"),)},
    "span of a negative version": {"spans": (replace(span(3, 8, 1), version=-1),)},
    "turn beyond the end": {"turns": (Turn(role="model", start=0, end=9),)},
    "overlapping turns": {
        "turns": (Turn(role="user", start=0, end=3), Turn(role="model", start=2, end=8))
    },
    "turn that ends before it starts": {"turns": (Turn(role="user", start=3, end=2),)},
    "unknown role": {"turns": (Turn(role="boss", start=0, end=3),)},  # type: ignore[arg-type]
    "turn at no time": {"turns": (Turn(role="model", start=0, end=8, ended=float("nan")),)},
    "nan reward": {"reward": float("nan")},
    "infinite part of the reward": {"rewards": {"a": float("inf")}},
    "text for a reward": {"reward": "1"},
    "reward beyond any float": {"reward": 10**400},
    "no reward": {"reward": None},
    "rewards that are a list": {"rewards": [1.0]},
    "part of the reward beyond any float": {"rewards": {"a": 10**400}},
    "temperature beyond any float": {"temperature": 10**400},
    "temperature as text": {"temperature": "1"},
    "time as text": {"turns": (Turn(role="user", start=0, end=3, started="1"),)},  # type: ignore[arg-type]
    "turn borders as text": {"turns": (Turn(role="user", start="0", end=3),)},  # type: ignore[arg-type]
    "turns that are no turns": {"turns": ("user",)},
    "no turns": {"turns": None},
    "span borders as text": {"spans": (span("3", 8, 1),)},  # type: ignore[arg-type]
    "spans that are a number": {"spans": 3},
    "role that is a list": {"turns": (Turn(role=[], start=0, end=3),)},  # type: ignore[arg-type]
    "token ids that are a number": {"token_ids": 8},
    "token ids in rows": {"token_ids": ((1, 2),) * 8},
    "ragged token ids": {"token_ids": (*ids_with, (1, 2))},
    "log-probs that are none": {"logprobs": None},
    "temperature zero": {"temperature": 0.0},
    "id that climbs": {"id": "../x"},
    "empty group id": {"group_id": ""},
    "group of none": {"group_size": 0},
    "unknown finish reason": {"finish_reason": "bored"},
    "seed beyond 64 bits": {"seed": 2**63},
    "seed beyond any integer": {"seed": 2**80},
    "metadata that is no text": {"metadata": {"a": 1}},
    "metadata that is no unicode": {"metadata": {"a": "\ud800"}},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_trajectory_cannot_be_written(what: str) -> None:
    with pytest.raises(FormatError):
        encode_batch([episode("fine"), episode(**BROKEN[what])], run_id=RUN, sequence=0)


def test_rounding_above_zero_is_allowed() -> None:
    encode_batch([episode(logprobs=(*zeros, 1e-6))], run_id=RUN, sequence=0)


def sealed(body: bytes, /, **prefix: int) -> bytes:
    """A batch around any body, with a right digest: what only an attacker writes."""
    payload = zstandard.compress(body, 1)
    sizes = {"format": 1, "zero": 0, "sequence": 0, "body": len(body), "payload": len(payload)}
    head = struct.pack("<4sHHQII", b"FCTB", *(sizes | prefix).values())
    return head + blake3(head).update(payload).digest() + payload


def body_of(data: bytes) -> bytes:
    return zstandard.decompress(data[56:])


def forged(change: Callable[[list[Any]], object]) -> bytes:
    """A batch of two whose header was changed and everything around it made right again."""
    body = body_of(encode_batch(group("g", 2), run_id=RUN, sequence=0))
    (size,) = struct.unpack_from("<I", body)
    header = msgspec.msgpack.decode(body[4 : 4 + size])
    change(header)
    packed = msgspec.msgpack.encode(header)
    return sealed(struct.pack("<I", len(packed)) + packed + body[4 + size :])


RECORDS, POLICY, TOKENS, VALUES, MASK_RUNS, SPANS, REWARD = 3, 2, 4, 5, 6, 8, 10


def put(field: int, *values: Any) -> Callable[[list[Any]], object]:
    def change(header: list[Any]) -> None:
        for record, value in zip(header[RECORDS], values, strict=False):
            record[field] = value

    return change


GOOD = encode_batch([episode()], run_id=RUN, sequence=0)
ATTACKS: dict[str, bytes] = {
    "nothing": b"",
    "prefix alone": GOOD[:56],
    "cut": GOOD[:-1],
    "trailing byte": GOOD + b"\0",
    "empty body": sealed(b""),
    "a body of zeros": sealed(bytes(100)),
    "header length 0": sealed(struct.pack("<I", 0)),
    "header length 1": sealed(struct.pack("<I", 1)),
    "header length 2**31": sealed(struct.pack("<I", 1 << 31) + bytes(64)),
    "header length 2**32-1": sealed(struct.pack("<I", (1 << 32) - 1) + bytes(64)),
    "body size 2**32-1": sealed(bytes(64), body=(1 << 32) - 1),
    "body size too small": sealed(bytes(64), body=63),
    "payload size 2**32-1": sealed(bytes(64), payload=(1 << 32) - 1),
    "sequence beyond keys": sealed(bytes(64), sequence=10**12),
    "other format": sealed(bytes(64), format=3),
    "reserved bits": sealed(bytes(64), zero=1),
    "bomb": sealed(bytes(enc.MAX_BODY_BYTES + 1)),
    "bomb that lies": sealed(bytes(enc.MAX_BODY_BYTES + 1), body=1000),
    "a million records": sealed(b"\x0a\0\0\0\x94\xa1r\x01\x90\xdd\x00\x0f\x42\x40" + bytes(600)),
    "2**32-1 records": sealed(b"\x0a\0\0\0\x94\xa1r\x01\x90\xdd\xff\xff\xff\xff" + bytes(600)),
    "4 Mi tokens claimed": forged(put(TOKENS, 1 << 22)),
    "over 8 Mi tokens claimed": forged(put(TOKENS, 1 << 22, 1 << 22)),
    "tokens moved to a neighbour": forged(put(TOKENS, 5, 11)),
    "negative tokens": forged(put(TOKENS, -1)),
    "tokens 2**63": forged(put(TOKENS, 1 << 63)),
    "values moved to a neighbour": forged(put(VALUES, 4, 6)),
    "no runs": forged(put(MASK_RUNS, 0)),
    "runs moved to a neighbour": forged(put(MASK_RUNS, 1, 3)),
    "policy out of range": forged(lambda h: h[RECORDS][0][SPANS][0].__setitem__(POLICY, 1)),
    "policy -1": forged(lambda h: h[RECORDS][0][SPANS][0].__setitem__(POLICY, -1)),
    "width 0": forged(lambda h: h.__setitem__(1, 0)),
    "width 5": forged(lambda h: h.__setitem__(1, 5)),
    "run id that climbs": forged(lambda h: h.__setitem__(0, "../x")),
    "text for a number": forged(put(TOKENS, "8")),
    "record too short": forged(lambda h: h[RECORDS][0].pop()),
    "record too long": forged(lambda h: h[RECORDS][0].extend([1, 1])),
    "nan reward": forged(put(REWARD, float("nan"))),
}


@pytest.mark.parametrize("what", ATTACKS)
def test_attacks_are_refused_in_little_memory(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(REFUSALS):
            decode_batch(ATTACKS[what])
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    for data in (code, sealed(code), sealed(struct.pack("<I", len(code)) + code)):
        with pytest.raises(REFUSALS):
            decode_batch(data)
    assert not canary.exists()


def test_any_flipped_bit_is_refused() -> None:
    data = encode_batch(group("g"), run_id=RUN, sequence=7)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(REFUSALS):
            decode_batch(bytes(flipped))


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_bodies_decode_or_are_refused(data: st.DataObject) -> None:
    body = bytearray(body_of(encode_batch(group("g", 3), run_id=RUN, sequence=0)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(len(body) - 1, 0)))
        action = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if action == "set" and body:
            body[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del body[at : at + data.draw(st.integers(1, 8))]
        else:
            body[at:at] = data.draw(st.binary(max_size=8))
    try:
        read = decode_batch(sealed(bytes(body)))
    except REFUSALS:
        return
    # What is accepted is valid, and says the same when it is written again.
    again = encode_batch(read.trajectories, run_id=read.run_id, sequence=read.sequence)
    assert decode_batch(again) == read


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    for candidate in (data, b"FCTB" + data, sealed(data)):
        with pytest.raises(REFUSALS):
            decode_batch(candidate)


def test_large_batches_are_split_and_rejoin_exactly() -> None:
    batch = group("g", 16, answer=3000)
    payloads = enc.pack(batch, run_id=RUN, max_bytes=64 << 10)
    assert len(payloads) > 1
    assert all(p.size <= 64 << 10 for p in payloads)
    assert [t for p in payloads for t in decode_batch(enc.seal(p, 0)).trajectories] == batch


def test_one_trajectory_over_the_limit_is_named() -> None:
    large = episode("large", answer=60_000)
    with pytest.raises(TrajectoryTooLargeError, match="Trajectory large takes"):
        enc.pack(
            [episode("small"), large],
            run_id=RUN,
            max_bytes=64 << 10,
            max_trajectory_bytes=64 << 10,
        )


def test_the_longest_trajectory_fits_and_a_longer_one_does_not() -> None:
    count = 1 << 22
    longest = replace(
        episode(turns=()),
        token_ids=(7,) * count,
        logprobs=(-1.0,) * count,
        loss_mask=(True,) * count,
        spans=(span(0, count, 0),),
    )
    data = encode_batch([longest], run_id=RUN, sequence=0)
    assert len(decode_batch(data).trajectories[0].token_ids) == count
    with pytest.raises(LimitError):
        encode_batch([replace(longest, token_ids=(7,) * (count + 1))], run_id=RUN, sequence=0)


def test_same_trajectories_same_bytes_whatever_the_order_of_dicts() -> None:
    one = episode(rewards={"a": 1.0, "b": 2.0}, metadata={"x": "1", "y": "2"})
    two = episode(rewards={"b": 2.0, "a": 1.0}, metadata={"y": "2", "x": "1"})
    first, second = (encode_batch([t], run_id=RUN, sequence=0) for t in (one, two))
    assert first == second


@pytest.mark.parametrize("top_k", [0, 1, 50])
def test_top_k_arrives(top_k: int) -> None:
    data = encode_batch([episode(top_k=top_k)], run_id=RUN, sequence=0)
    assert decode_batch(data).trajectories[0].top_k == top_k


def test_golden_body() -> None:
    """The body of format 1 (zstd's own output may differ by release): other bytes need another
    format number."""
    body = body_of(encode_batch([episode()], run_id=RUN, sequence=3))
    assert blake3(body).hexdigest()[:16] == GOLDEN


GOLDEN = "e1f5c6d4f90d8a05"


# --- format 2: routed experts, feedback on turns ---------------------------------------------


def routed(tokens: int, layers: int = 3, top_k: int = 2, *, width: int = 1, seed: int = 0) -> Any:
    """Distinct experts for each token and layer, of 40 or of 400."""
    rng = np.random.default_rng(seed)
    count = 40 if width == 1 else 400
    ids = rng.random((tokens, layers, count)).argsort(-1)[..., :top_k]
    return RoutedExperts.of(ids.astype(f"u{width}"))


def told(trajectory: Trajectory, text: str) -> Trajectory:
    """Feedback on the model's turn."""
    first, second = trajectory.turns
    return replace(trajectory, turns=(first, replace(second, feedback=text)))


@pytest.mark.parametrize("width", [1, 2])
def test_routed_experts_come_home_bit_for_bit(width: int) -> None:
    batch = [
        episode("a", experts=routed(8, width=width)),
        episode("b"),
        episode("c", experts=routed(7, width=width, seed=1)),
    ]
    data = encode_batch(batch, run_id=RUN, sequence=0)
    assert data[4] == 2
    back = decode_batch(data).trajectories
    assert back == tuple(batch)
    assert back[2].experts is not None
    assert back[2].experts.tokens == 7
    assert np.array_equal(back[2].experts.array(), routed(7, width=width, seed=1).array())


def test_feedback_on_a_turn_comes_home() -> None:
    batch = [told(episode("a"), "the file was not there"), episode("b")]
    data = encode_batch(batch, run_id=RUN, sequence=0)
    assert data[4] == 2
    assert decode_batch(data).trajectories == tuple(batch)


def test_what_needs_no_later_format_is_written_in_the_first() -> None:
    assert encode_batch([episode()], run_id=RUN, sequence=0)[4] == 1


@pytest.mark.parametrize(
    "experts",
    [
        RoutedExperts(layers=3, top_k=2, width=1, ids=b""),
        RoutedExperts(layers=3, top_k=2, width=1, ids=bytes(7)),
        RoutedExperts(layers=3, top_k=2, width=1, ids=bytes(6 * 9)),
        RoutedExperts(layers=3, top_k=2, width=4, ids=bytes(24)),
        RoutedExperts(layers=0, top_k=2, width=1, ids=bytes(6)),
        RoutedExperts(layers=1 << 11, top_k=2, width=1, ids=bytes(1 << 12)),
        "no experts",
        RoutedExperts(layers=1, top_k=1, width=1, ids="12345678"),  # type: ignore[arg-type]
        RoutedExperts(layers=1, top_k=1, width=1, ids=None),  # type: ignore[arg-type]
        RoutedExperts(layers="1", top_k=1, width=1, ids=bytes(8)),  # type: ignore[arg-type]
        RoutedExperts(layers=1.5, top_k=1, width=1, ids=bytes(6)),  # type: ignore[arg-type]
        RoutedExperts(layers=-1, top_k=-2, width=1, ids=bytes(8)),
    ],
    ids=lambda experts: repr(experts)[:60],
)
def test_broken_experts_cannot_be_written(experts: Any) -> None:
    with pytest.raises(FormatError):
        encode_batch([episode(experts=experts)], run_id=RUN, sequence=0)


@pytest.mark.parametrize(
    "given",
    [
        "experts",
        None,
        [[["a"]]],
        np.zeros((2, 3), "u1"),
        np.zeros((2, 3, 1)),
        np.zeros((2, 3, 1), "i8"),
        np.zeros((2, 0, 1), "u1"),
        np.zeros((2, 1, 1 << 9), "u1"),
    ],
)
def test_experts_of_another_kind_are_one_typed_error(given: Any) -> None:
    with pytest.raises(FormatError, match="experts"):
        RoutedExperts.of(given)


@pytest.mark.parametrize("name", ["reward", "temperature", "top_p"])
def test_numbers_of_400_digits_are_one_typed_error(name: str) -> None:
    with pytest.raises(FormatError):
        check_trajectory(episode(**{name: 10**400}))
    with pytest.raises(FormatError):
        check_trajectory(episode(rewards={"part": 10**400}))


def test_one_batch_has_one_shape_of_experts() -> None:
    batch = [episode("a", experts=routed(8)), episode("b", experts=routed(8, layers=4))]
    with pytest.raises(FormatError, match="several batches"):
        encode_batch(batch, run_id=RUN, sequence=0)


def test_more_versions_than_one_header_names_are_written_as_several_batches() -> None:
    half = MAX_POLICIES // 2 + 1
    batch = [
        episode(
            name,
            prompt=0,
            answer=half,
            turns=(),
            spans=tuple(span(i, i + 1, first + i) for i in range(half)),
        )
        for name, first in (("a", 0), ("b", half))
    ]
    with pytest.raises(LimitError, match="several batches"):
        encode_batch(batch, run_id=RUN, sequence=0)
    payloads = enc.pack(batch, run_id=RUN)
    assert [p.trajectories for p in payloads] == [(batch[0],), (batch[1],)]


ROUTED, SHAPE = 20, 4


def forged_2(change: Callable[[list[Any]], object], format: int = 2) -> bytes:
    """As `forged`, of two trajectories with experts."""
    batch = [replace(t, experts=routed(8)) for t in group("g", 2)]
    body = body_of(encode_batch(batch, run_id=RUN, sequence=0))
    (size,) = struct.unpack_from("<I", body)
    header = msgspec.msgpack.decode(body[4 : 4 + size])
    change(header)
    packed = msgspec.msgpack.encode(header)
    return sealed(struct.pack("<I", len(packed)) + packed + body[4 + size :], format=format)


ATTACKS_2: dict[str, bytes] = {
    "said to be format 1": forged_2(lambda _: None, format=1),
    "said to be format 3": forged_2(lambda _: None, format=3),
    "format 2 without need": sealed(body_of(GOOD), format=2),
    "no shape": forged_2(lambda h: h.pop()),
    "a shape and no rows": forged_2(put(ROUTED, 0, 0)),
    "rows beyond the tokens": forged_2(put(ROUTED, 9, 7)),
    "4 Mi rows": forged_2(put(ROUTED, 1 << 22, 1 << 22)),
    "negative rows": forged_2(put(ROUTED, -1)),
    "more layers": forged_2(lambda h: h.__setitem__(SHAPE, [4, 2, 1])),
    "a thousand layers of 256": forged_2(lambda h: h.__setitem__(SHAPE, [1 << 10, 1 << 8, 2])),
    "layers 2**63": forged_2(lambda h: h.__setitem__(SHAPE, [1 << 63, 2, 1])),
    "width 0": forged_2(lambda h: h.__setitem__(SHAPE, [3, 4, 0])),
    "width 3": forged_2(lambda h: h.__setitem__(SHAPE, [1, 2, 3])),
}


@pytest.mark.parametrize("what", ATTACKS_2)
def test_attacks_on_experts_are_refused_in_little_memory(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(REFUSALS):
            decode_batch(ATTACKS_2[what])
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_golden_body_of_format_2() -> None:
    batch = [told(episode("a", experts=routed(8)), "so so"), episode("b", top_k=5)]
    body = body_of(encode_batch(batch, run_id=RUN, sequence=3))
    assert blake3(body).hexdigest()[:16] == GOLDEN_2


GOLDEN_2 = "c420397f152d0f58"


def test_bytes_a_token_of_routed_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """48 layers, 8 of 128 experts, favourites that differ by layer: at most 1.1 times the entropy
    of each place in the ranking by itself, and below what fixed-width bits take."""
    layers, top_k, experts, tokens = 48, 8, 128, 600
    rng = np.random.default_rng(0)
    liking = rng.gumbel(size=(layers, experts)) * 1.2
    scores = liking + rng.gumbel(size=(2 * tokens, layers, experts))
    chosen = (-scores).argsort(-1)[..., :top_k].astype(np.uint8)
    batch = group("g", 2, answer=tokens - 3)
    with_experts = [
        replace(t, experts=RoutedExperts.of(chosen[i * tokens : (i + 1) * tokens]))
        for i, t in enumerate(batch)
    ]
    plain, full = (len(encode_batch(b, run_id=RUN, sequence=0)) for b in (batch, with_experts))
    size = (full - plain) / (2 * tokens)
    bound = sum(entropy(chosen[:, layer, k]) for layer in range(layers) for k in range(top_k)) / 8
    with capsys.disabled():
        print(
            f"\nrouted experts, 48 layers x 8 of 128: {size:.0f} bytes a token; raw 384, "
            f"7-bit 336, entropy by layer and rank {bound:.0f}"
        )
    assert size < 336
    assert size < 1.1 * bound


def entropy(values: Any) -> float:
    """Bits of one value."""
    share = np.bincount(values) / len(values)
    return float(-(share[share > 0] * np.log2(share[share > 0])).sum())
