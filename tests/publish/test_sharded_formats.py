"""Ranks derive their own rows of each served format: the versions are those of one process."""

from typing import Any

import numpy as np
import pytest

from farcast.delta import to_bits
from farcast.errors import ConfigError, PoisonError, RankError
from farcast.formats.deriving import Rows, derive
from farcast.publish import Publisher
from farcast.store import MemoryStore, Store
from farcast.store.archive import Archive
from shard_world import FakeDTensor, Meeting, ThreadComms, on_ranks
from version_world import RUN, clone

FORMATS = ["bf16", "fp8_block", "fp8_block_pow2", "nvfp4", "int4_g32", "int8", "mxfp4"]
PART_BYTES = 4096
LAYER = "model.layers.0"


def masters(step: int) -> dict[str, Any]:
    """300 rows over 2 or 3 ranks: the border between ranks lies inside a block of 128 rows."""
    rng = np.random.default_rng(5)
    shapes = {
        "model.embed_tokens.weight": (33, 64),
        f"{LAYER}.self_attn.q_proj.weight": (300, 64),
        f"{LAYER}.self_attn.k_proj.weight": (130, 64),
        f"{LAYER}.mlp.up_proj.weight": (1, 64),
        "model.norm.weight": (64,),
    }
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for _ in range(step):
        for array in made.values():
            array += rng.normal(size=array.shape).astype(np.float32) * np.float32(1e-3)
    return made


def spread(whole: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """As FSDP2 hands them over; a plain parameter and a buffer beside the shards."""
    return {
        name: array if name == "model.norm.weight" else FakeDTensor(array, rank, ranks)
        for name, array in whole.items()
    } | {"steps": to_bits(np.arange(3, dtype=np.int64))}


def publishers(store: Store, ranks: int, **options: Any) -> list[Any]:
    meeting = Meeting(ranks)

    def made(rank: int) -> Publisher:
        comms = ThreadComms(meeting, rank)
        settings = {"formats": FORMATS, "part_bytes": PART_BYTES, "writer": "w"} | options
        return Publisher(store, RUN, comms=comms, anchor_every=3, **settings)

    return on_ranks(ranks, made)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_manifest_is_that_of_one_process(ranks: int) -> None:
    spread_store, alone_store = MemoryStore(), MemoryStore()
    many = publishers(spread_store, ranks)
    one = Publisher(
        alone_store, RUN, formats=FORMATS, part_bytes=PART_BYTES, writer="w", anchor_every=3
    )
    for step in range(5):
        if step == 2:  # all ranks are started again
            many = publishers(spread_store, ranks)
        whole = masters(step)
        refs = on_ranks(
            ranks, lambda r, m=many, s=step, w=whole: m[r].publish(spread(w, r, ranks), s)
        )
        one.publish(whole | {"steps": to_bits(np.arange(3, dtype=np.int64))}, step)
        manifests = [Archive(s, RUN).manifest(step) for s in (spread_store, alone_store)]
        assert refs == [manifests[0].ref] * ranks
        for spread_view, alone_view in zip(manifests[0].views, manifests[1].views, strict=True):
            assert spread_view.root == alone_view.root, (step, spread_view.served_format)
            assert (spread_view.anchor is None) == (alone_view.anchor is None)
            assert spread_view.precision_rule == alone_view.precision_rule
    for name in FORMATS:
        archive = Archive(spread_store, RUN, served_format=name)
        assert archive.restore(4).ref.root == archive.manifest(4).root


def test_the_rows_of_a_rank_alone_would_give_other_scales() -> None:
    """What the exchange is for: shards that look only at themselves serve another version."""
    whole = masters(0)[f"{LAYER}.self_attn.q_proj.weight"]
    import torch

    name = f"{LAYER}.self_attn.q_proj.weight"
    full = derive({name: torch.from_numpy(whole)}, "fp8_block")
    half = derive({name: torch.from_numpy(whole[:150])}, "fp8_block", rows={name: Rows(0, 300)})
    scale = f"{LAYER}.self_attn.q_proj.weight_scale_inv"
    assert not torch.equal(full[scale][1], half[scale][1])


def test_a_rank_whose_masters_cannot_be_served_stops_all_and_nothing_moves() -> None:
    store = MemoryStore()
    many = publishers(store, 2)
    on_ranks(2, lambda r: many[r].publish(spread(masters(0), r, 2), 0))
    before = clone(store)
    for name, row in ((f"{LAYER}.self_attn.q_proj.weight", 5), (f"{LAYER}.mlp.up_proj.weight", 0)):
        whole = masters(1)
        whole[name][row, 3] = np.nan
        found = on_ranks(2, lambda r, w=whole: many[r].publish(spread(w, r, 2), 1))
        assert any(isinstance(error, PoisonError) for error in found)
        assert all(isinstance(error, PoisonError | RankError) for error in found)
    assert [i.key for i in store.list("")] == [i.key for i in before.list("")]
    refs = on_ranks(2, lambda r: many[r].publish_async(spread(masters(1), r, 2), 1).result())
    assert {ref.version for ref in refs} == {1}  # type: ignore[union-attr]


def test_what_goes_on_from_served_codes_is_refused_on_ranks() -> None:
    found = publishers(MemoryStore(), 2, formats=["bf16", "int8-round0.75"])
    assert all(isinstance(error, ConfigError) for error in found)
