"""vLLM with two tensor parallel workers: each holds rows of the fused projections, columns of the
others and a padded shard of the vocabulary; a version is in both or in neither."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_world import VllmWorld

from farcast.engines.http_engine import label_of
from farcast.errors import TargetError

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmWorld]:
    folder: Path = tmp_path_factory.mktemp("pair")
    arguments = ("--tensor-parallel-size", "2")
    with VllmWorld.started(folder, *arguments, model="tiny") as world:
        yield world


def test_each_member_holds_its_part(pair: VllmWorld) -> None:
    assert pair.subscriber.stage() is None
    first, second = pair.target.members
    embedding = [member.blocks["model.embed_tokens.weight"] for member in (first, second)]
    vocabulary, hidden = pair.versions[-1]["model.embed_tokens.weight"].shape
    assert sum(block.count for (block,) in embedding) == vocabulary * hidden
    columns = first.blocks["model.layers.0.self_attn.o_proj.weight"]
    assert len(columns[0].sizes) == 2, "columns of a tensor are not one run"


def test_versions_reach_both_members_and_the_answers(pair: VllmWorld) -> None:
    before = pair.server.answers("before")
    for _ in range(2):
        pair.publish_change(share=0.05)
        assert pair.subscriber.sync() == pair.refs[-1]
        assert pair.target.verify() == pair.refs[-1].root
    after = pair.server.answers("after")
    assert after != before
    assert pair.subscriber.sync(pair.refs[0]) == pair.refs[0]
    assert pair.server.answers("back") == before
    assert pair.subscriber.sync() == pair.refs[-1]
    assert pair.server.answers("again") == after


def test_a_member_that_fails_takes_both_back(pair: VllmWorld) -> None:
    """Case 071."""
    pair.subscriber.sync()
    old, answers = pair.refs[-1], pair.server.answers("old")
    pair.publish_change(share=0.05)
    staged = pair.subscriber.stage()
    assert staged is not None
    pair.rpc("farcast_test_fail", "3", "1")
    with pytest.raises(TargetError, match="fault"):
        pair.subscriber.commit(staged)
    staged.discard()
    assert {receipt.label for receipt in pair.engine.receipts()} <= {label_of(old), ""}
    assert pair.target.verify() == old.root
    assert pair.engine.label() == label_of(old)
    assert pair.server.answers("still old") == answers
    assert pair.subscriber.sync() == pair.refs[-1]
