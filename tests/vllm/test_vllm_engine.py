"""vLLM's real server on CPU, stock, with farcast's plug-in: what it serves is the version that it
says, word for word, and answers as a server that loaded that version from disk does."""

import json
import threading
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from vllm_world import RUN, Server, VllmWorld, changed

from farcast.delta import TensorBits, words_of
from farcast.engines.http_engine import label_of
from farcast.errors import IntegrityError, TargetChangedError, TargetError, TensorMismatchError
from farcast.publish import Publisher
from farcast.replica import Subscriber
from farcast.store import MemoryStore

pytestmark = pytest.mark.vllm


def sync(vllm: VllmWorld) -> None:
    """Bring the server to the newest version."""
    assert vllm.subscriber.sync() == vllm.refs[-1]


def checksums(server: Server) -> dict[str, str]:
    """SHA-256 of every parameter in the engine's own layout, by vLLM."""
    found: dict[str, str] = server.post("/weight_checker", {"action": "checksum"})["checksums"]
    assert len(found) > 100
    return found


def test_a_fresh_engine_is_recognised_without_moving_a_byte(vllm: VllmWorld) -> None:
    plan = vllm.subscriber.plan()
    assert plan.have == vllm.refs[0]
    assert plan.bytes == 0 or plan.want != plan.have
    (member,) = vllm.target.members
    assert not member.opaque
    assert not member.skipped
    fused = member.blocks["model.layers.0.self_attn.k_proj.weight"]
    assert fused[0].memory == member.blocks["model.layers.0.self_attn.q_proj.weight"][0].memory


def test_consecutive_versions_answer_as_a_fresh_load_of_the_last(vllm: VllmWorld) -> None:
    sync(vllm)
    before = vllm.server.answers("before")
    for _ in range(3):
        vllm.publish_change()
        sync(vllm)
        assert vllm.engine.label() == label_of(vllm.refs[-1])
        assert vllm.target.verify() == vllm.refs[-1].root
    live = vllm.server.answers("after")
    assert live != before
    fresh_folder = vllm.folder_of(vllm.refs[-1].version)
    with Server.started(fresh_folder, vllm.folder / "fresh.log") as fresh:
        assert fresh.answers("after") == live
        assert checksums(fresh) == checksums(vllm.server)


def test_vllms_own_checker_finds_the_weights_of_the_version_that_is_named(vllm: VllmWorld) -> None:
    sync(vllm)
    old, held = vllm.refs[-1], checksums(vllm.server)
    vllm.publish_change()
    sync(vllm)
    compare = {"action": "compare", "baseline": held}
    assert vllm.server.post("/weight_checker", compare)["match"] is False
    vllm.subscriber.sync(old)
    assert vllm.server.post("/weight_checker", compare) == {"match": True, "mismatches": []}
    sync(vllm)


def test_versions_missed_are_folded_into_one_commit(vllm: VllmWorld) -> None:
    sync(vllm)
    commits = vllm.subscriber.totals.versions
    for _ in range(3):
        vllm.publish_change()
    sync(vllm)
    assert vllm.subscriber.totals.versions == commits + 1
    assert vllm.target.verify() == vllm.refs[-1].root


def test_rolling_back_gives_the_answers_of_the_old_version(vllm: VllmWorld) -> None:
    sync(vllm)
    old, answers = vllm.refs[-1], vllm.server.answers("old")
    vllm.publish_change(share=0.05)
    sync(vllm)
    assert vllm.server.answers("new") != answers
    assert vllm.subscriber.sync(old) == old
    assert vllm.server.answers("old again") == answers
    sync(vllm)


def test_a_change_of_one_projection_leaves_the_fused_neighbours_alone(vllm: VllmWorld) -> None:
    """Case 029."""
    sync(vllm)
    bits = dict(vllm.versions[-1])
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.mlp.gate_proj.weight"):
        bits[name] = changed({name: bits[name]}, seed=99, share=0.5)[name]
    vllm.publish(bits)
    names = [f"model.layers.3.self_attn.{part}_proj.weight" for part in "kv"]
    names.append("model.layers.3.mlp.up_proj.weight")
    before = vllm.target.live_entries(names)
    sync(vllm)
    assert vllm.target.live_entries(names) == before
    assert vllm.target.verify() == vllm.refs[-1].root


def test_every_bit_pattern_reaches_the_engine(vllm: VllmWorld) -> None:
    """NaN payloads, infinities and negative zeros are words like others: nothing stands for
    "unchanged"."""
    sync(vllm)
    bits = dict(vllm.versions[-1])
    name = "model.layers.29.mlp.down_proj.weight"
    words = words_of(bits[name]).copy()
    odd = np.array([0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0001], np.uint16)
    words[100 : 100 + odd.size] = odd
    changed_bits = {**bits, name: TensorBits("BF16", bits[name].shape, words.view(np.uint8))}
    vllm.publish(changed_bits)
    sync(vllm)
    assert vllm.target.verify() == vllm.refs[-1].root
    vllm.publish(bits)
    sync(vllm)


class Streaming(threading.Thread):
    """One long answer, with what vLLM says of the versions that wrote it."""

    def __init__(self, server: Server, tokens: int) -> None:
        super().__init__(daemon=True)
        self.body = {
            "token_ids": [504, 3575, 282, 4649, 314],
            "sampling_params": {"max_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "stream": True,
        }
        self.url = server.address + "/inference/v1/generate"
        self.first = threading.Event()
        self.tokens: list[int] = []
        self.spans: list[dict[str, Any]] = []

    def run(self) -> None:
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self.url, json.dumps(self.body).encode(), headers)) as response:
            for line in response:
                text = line.decode().removeprefix("data:").strip()
                if not text or text == "[DONE]":
                    continue
                choice = json.loads(text)["choices"][0]
                self.tokens += choice.get("token_ids") or []
                self.spans = choice.get("weight_versions") or self.spans
                if self.tokens:
                    self.first.set()


def test_a_commit_falls_into_answers_in_flight(vllm: VllmWorld) -> None:
    sync(vllm)
    old = vllm.refs[-1]
    vllm.publish_change()
    streams = [Streaming(vllm.server, tokens) for tokens in (60, 90)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.first.wait(60)
    staged = vllm.subscriber.stage()
    assert staged is not None
    vllm.subscriber.commit(staged)
    for stream, tokens in zip(streams, (60, 90), strict=True):
        stream.join(timeout=120)
        assert len(stream.tokens) == tokens, "a commit lost an answer"
    spans = [[span["version"] for span in stream.spans] for stream in streams]
    assert spans == [[label_of(old), label_of(vllm.refs[-1])]] * 2


def test_a_write_that_fails_is_undone(vllm: VllmWorld) -> None:
    sync(vllm)
    old, answers = vllm.refs[-1], vllm.server.answers("old")
    vllm.publish_change()
    staged = vllm.subscriber.stage()
    assert staged is not None
    vllm.rpc("farcast_test_fail", "137")
    with pytest.raises(TargetError, match="fault"):
        vllm.subscriber.commit(staged)
    staged.discard()
    assert vllm.target.ref == old
    assert vllm.engine.label() == label_of(old)
    assert vllm.target.verify() == old.root
    assert vllm.server.answers("still old") == answers
    sync(vllm)
    assert vllm.target.verify() == vllm.refs[-1].root


def test_an_engine_that_only_says_yes_is_not_believed(vllm: VllmWorld) -> None:
    """Case 061."""
    sync(vllm)
    old = vllm.refs[-1]
    vllm.publish_change()
    staged = vllm.subscriber.stage()
    assert staged is not None
    vllm.rpc("farcast_test_ignore_writes", "on")
    try:
        with pytest.raises(IntegrityError):
            vllm.subscriber.commit(staged)
    finally:
        vllm.rpc("farcast_test_ignore_writes", "off")
    staged.discard()
    assert vllm.target.ref == old
    assert vllm.target.verify() == old.root
    sync(vllm)


def test_words_that_somebody_else_wrote_are_noticed(vllm: VllmWorld) -> None:
    """Case 045: at staging, between staging and commit, and by the live root at any time."""
    sync(vllm)
    name = "model.layers.7.self_attn.o_proj.weight"
    vllm.publish_change()
    new = words_of(vllm.versions[-1][name])
    at = str(int(np.flatnonzero(new != words_of(vllm.versions[-2][name]))[0]))
    vllm.rpc("farcast_test_flip", name, at)
    with pytest.raises(TargetChangedError, match="o_proj"):
        vllm.target.verify()
    with pytest.raises(TargetChangedError):
        vllm.subscriber.stage()
    vllm.rpc("farcast_test_flip", name, at)
    staged = vllm.subscriber.stage()
    assert staged is not None
    vllm.rpc("farcast_test_flip", name, at)
    with pytest.raises(TargetChangedError):
        vllm.subscriber.commit(staged)
    staged.discard()
    assert vllm.target.verify() == vllm.refs[-2].root, "undoing restores what should be there"
    sync(vllm)
    assert vllm.target.verify() == vllm.refs[-1].root


def other_run(bits: dict[str, TensorBits]) -> MemoryStore:
    store = MemoryStore()
    Publisher(store, RUN).publish(bits, step=0)
    return store


def test_unknown_and_missing_names_are_listed_and_nothing_is_written(vllm: VllmWorld) -> None:
    """Case 013."""
    sync(vllm)
    bits = dict(vllm.versions[-1])
    bits["model.layers.0.mlp.gate.weight"] = bits.pop("model.layers.0.mlp.gate_proj.weight")
    target = vllm.new_target("first")
    with pytest.raises(TensorMismatchError) as caught:
        Subscriber(other_run(bits), RUN, target).sync()
    assert "mlp.gate.weight" in str(caught.value)
    assert "mlp.gate_proj.weight" in str(caught.value)
    assert vllm.target.verify() == vllm.refs[-1].root


def test_another_dtype_is_refused_and_never_cast(vllm: VllmWorld) -> None:
    """Cases 023 and 031."""
    sync(vllm)
    name = "model.norm.weight"
    bits = dict(vllm.versions[-1])
    wide = (words_of(bits[name]).astype(np.uint32) << 16).view(np.uint8)
    bits[name] = TensorBits("F32", bits[name].shape, wide)
    with pytest.raises(TensorMismatchError, match="F32"):
        Subscriber(other_run(bits), RUN, vllm.new_target("first")).sync()
    assert vllm.target.verify() == vllm.refs[-1].root


def test_an_engine_with_other_weights_than_its_folder_is_refused(vllm: VllmWorld) -> None:
    sync(vllm)
    vllm.publish_change()
    other = vllm.folder_of(vllm.refs[-1].version)
    sync(vllm)
    vllm.publish_change()
    sync(vllm)
    target = vllm.new_target("other")
    target._folder = other
    with pytest.raises(TensorMismatchError, match="does not hold the weights"):
        Subscriber(vllm.store, RUN, target).stage()


def test_a_sidecar_that_starts_again_finds_the_engine_where_it_is(vllm: VllmWorld) -> None:
    sync(vllm)
    again = Subscriber(vllm.store, RUN, vllm.new_target("first"))
    assert again.stage() is None
    assert again.ref == vllm.refs[-1]


def test_dropped_caches_forget_the_old_versions_prefix(vllm: VllmWorld) -> None:
    """Case 019: the same prompt without a salt, before and after a commit."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    target = vllm.new_target("first", caches="dropped")
    subscriber = Subscriber(vllm.store, RUN, target)
    subscriber.sync()
    vllm.server.greedy(prompt)
    vllm.publish_change(share=0.05)
    subscriber.sync()
    unsalted, salted = vllm.server.greedy(prompt), vllm.server.greedy(prompt, cache_salt="new")
    assert unsalted == salted
