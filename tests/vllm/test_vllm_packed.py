"""vLLM with packed linear layers: tensors without a map are loaded whole, and the answers are
those of a server that loaded the version from disk."""

from collections.abc import Iterator

import pytest
from vllm_world import Server, VllmWorld

from farcast.errors import TargetError

pytestmark = pytest.mark.vllm

PACKED = ("--additional-config", '{"farcast": {"pack_linear": true}}')


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmWorld]:
    with VllmWorld.started(tmp_path_factory.mktemp("packed"), *PACKED, model="tiny") as world:
        yield world


def test_packed_layers_are_loaded_whole(
    packed: VllmWorld, caplog: pytest.LogCaptureFixture
) -> None:
    assert packed.subscriber.stage() is None
    (member,) = packed.target.members
    assert "model.layers.0.mlp.down_proj.weight" in member.opaque
    assert "model.embed_tokens.weight" in member.blocks
    before = packed.server.answers("before")
    for _ in range(2):
        packed.publish_change(share=0.05)
        assert packed.subscriber.sync() == packed.refs[-1]
    assert "loaded whole" in caplog.text
    live = packed.server.answers("after")
    assert live != before
    folder = packed.folder_of(packed.refs[-1].version)
    with Server.started(folder, packed.folder / "fresh.log", *PACKED, faults=True) as fresh:
        assert fresh.answers("after") == live
    assert packed.subscriber.sync(packed.refs[0]) == packed.refs[0]
    assert packed.server.answers("back") == before


def test_a_failed_commit_loads_the_old_layers_back(packed: VllmWorld) -> None:
    packed.subscriber.sync()
    old, answers = packed.refs[-1], packed.server.answers("old")
    packed.publish_change(share=0.05)
    staged = packed.subscriber.stage()
    assert staged is not None
    packed.rpc("farcast_test_fail_load", "on")
    with pytest.raises(TargetError, match="fault"):
        packed.subscriber.commit(staged)
    staged.discard()
    assert packed.target.ref == old
    assert packed.server.answers("still old") == answers
