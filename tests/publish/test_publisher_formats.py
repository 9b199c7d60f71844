"""One trainer, several served formats: one manifest, a root each, every reader exact."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from farcast.delta import root_of, to_bits
from farcast.delta.identity import entry_of
from farcast.errors import (
    ConfigError,
    PoisonError,
    StoreUnavailableError,
    TensorMismatchError,
    UnknownVersionError,
)
from farcast.formats import FORMATS
from farcast.formats.deriving import derive
from farcast.lineage import Signer
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import MemoryStore, Store
from farcast.store.archive import Archive
from farcast.store.collecting import find_garbage
from version_world import RUN, clone, plain

LAYER = "model.layers.0"


def masters(step: int = 0) -> dict[str, torch.Tensor]:
    """A small decoder's weights; each step moves all of them a little."""
    random = torch.Generator().manual_seed(3)
    shapes = {
        "model.embed_tokens.weight": (40, 64),
        f"{LAYER}.self_attn.q_proj.weight": (64, 64),
        f"{LAYER}.self_attn.k_proj.weight": (32, 64),
        f"{LAYER}.mlp.up_proj.weight": (256, 64),
        f"{LAYER}.mlp.down_proj.weight": (64, 256),
        "model.norm.weight": (64,),
    }
    made = {name: torch.randn(shape, generator=random) * 0.05 for name, shape in shapes.items()}
    for _ in range(step):
        for tensor in made.values():
            tensor += torch.randn(tensor.shape, generator=random) * 2e-4
    return made


def root(served: dict[str, Any]) -> str:
    return root_of({name: entry_of(to_bits(tensor)) for name, tensor in served.items()})


def bits(served: dict[str, Any]) -> Any:
    return plain({name: to_bits(tensor) for name, tensor in served.items()})


def rebuilt(store: Store, version: int, served_format: str) -> Any:
    return plain(Archive(store, RUN, served_format=served_format).rebuild(version))


def test_every_format_comes_back_exactly_over_anchors_deltas_and_squashed_deltas() -> None:
    store = MemoryStore()
    with Publisher(store, RUN, formats=FORMATS, anchor_every=6, squash=2) as publisher:
        for step in range(9):
            publisher.publish(masters(step), step)
    for name in FORMATS:
        archive = Archive(store, RUN, served_format=name)
        for version in (0, 3, 8):
            served = derive(masters(version), name)
            assert archive.manifest(version).root == root(served)
            assert rebuilt(store, version, name) == bits(served)
    whole = Archive(store, RUN).manifest(8)
    assert whole.served_formats == (FORMATS[0], *sorted(FORMATS[1:]))
    assert whole.view("int4_g32").precision_rule == "decoder"
    assert whole.view("fp16").precision_rule is msgspec.UNSET
    assert whole.view("nvfp4").bytes_full < whole.bytes_full / 2


def test_subscribers_follow_each_its_own_format() -> None:
    store = MemoryStore()
    names = ("bf16", "fp8_block", "int4_g32")
    subscribers = {
        name: Subscriber(store, RUN, MemoryTarget(), served_format=name) for name in names
    }
    with Publisher(store, RUN, formats=names, squash=2) as publisher:
        for step in range(5):
            ref = publisher.publish(masters(step), step)
            assert ref == Subscriber(store, RUN, MemoryTarget()).sync()
            for name, subscriber in subscribers.items():
                if step in (1, 2):
                    continue  # folds three versions into one commit afterwards
                synced = subscriber.sync()
                assert (synced.version, synced.root) == (step, root(derive(masters(step), name)))
    small = subscribers["int4_g32"].totals
    assert small.bytes_fetched < subscribers["bf16"].totals.bytes_fetched


def test_a_format_the_run_has_not_is_named() -> None:
    store = MemoryStore()
    with Publisher(store, RUN, formats=["bf16", "int8"]) as publisher:
        publisher.publish(masters(), 0)
    with pytest.raises(UnknownVersionError, match="served as nvfp4"):
        Subscriber(store, RUN, MemoryTarget(), served_format="nvfp4").sync()
    with pytest.raises(UnknownVersionError, match="bf16, int8"):
        Archive(store, RUN, served_format="nvfp4").manifest(0)


def test_sticky_formats_go_on_after_a_restart_as_if_there_had_been_none() -> None:
    formats = ["bf16-round0.75", "fp8_block-scale1.25-round0.75", "nvfp4-scale1.5"]
    one, other = MemoryStore(), MemoryStore()
    with Publisher(one, RUN, formats=formats, writer="w") as publisher:
        for step in range(4):
            publisher.publish(masters(step), step)
    for step in range(4):
        with Publisher(other, RUN, formats=formats, writer="w") as publisher:
            publisher.publish_async(masters(step), step).result()
    served: dict[str, Any] = {}
    for version in range(4):
        manifests = [Archive(store, RUN).manifest(version) for store in (one, other)]
        assert manifests[0] == manifests[1]
        served = derive(masters(version), formats[1], previous=served)
        assert manifests[0].view(formats[1]).root == root(served)
    assert root(served) != root(derive(masters(3), formats[1]))


def test_a_format_can_be_added_to_a_run_and_left_out_again() -> None:
    store = MemoryStore()
    with Publisher(store, RUN, formats=["bf16"]) as publisher:
        publisher.publish(masters(0), 0)
        publisher.publish(masters(1), 1)
    with Publisher(store, RUN, formats=["bf16", "int8"]) as publisher:
        again = publisher.publish(masters(1), 1)
        assert again.version == 2, "the same step, but not in the same formats"
        assert publisher.publish(masters(1), 1) == again
        publisher.publish(masters(2), 2)
    whole = Archive(store, RUN).manifest(2)
    assert whole.anchor is None
    assert whole.view("int8").anchor_version == 2
    assert rebuilt(store, 3, "int8") == bits(derive(masters(2), "int8"))
    with Publisher(store, RUN, formats=["bf16"]) as publisher:
        publisher.publish(masters(3), 3)
    subscriber = Subscriber(store, RUN, MemoryTarget(), served_format="int8")
    assert subscriber.sync().version == 3


def test_bits_are_served_as_they_are_and_async_takes_a_copy() -> None:
    store = MemoryStore()
    counts = np.arange(6, dtype=np.float32)
    given = masters(0) | {"counts": to_bits(counts)}
    with Publisher(store, RUN, formats=["bf16", "int8"]) as publisher:
        job = publisher.publish_async(given, 0)
        counts[:] = 9
        for tensor in masters(0).values():
            tensor.zero_()
        job.result()
        with pytest.raises(TensorMismatchError, match="twice"):
            publisher.publish([("a", torch.ones(2)), ("a", torch.ones(2))], 1)
    expected = bits({"counts": np.arange(6, dtype=np.float32)})
    for name in ("bf16", "int8"):
        assert rebuilt(store, 0, name) == bits(derive(masters(0), name)) | expected


def test_numpy_and_generators_give_the_same_version_as_torch() -> None:
    refs = set()
    for given in (
        masters(1),
        {name: tensor.numpy() for name, tensor in masters(1).items()},
        ((f"_orig_mod.{name}", tensor) for name, tensor in masters(1).items()),
    ):
        with Publisher(MemoryStore(), RUN, formats=["fp16", "int4_g32"], writer="w") as publisher:
            refs.add(publisher.publish(given, 1))
    assert len(refs) == 1


def test_a_failed_put_moves_no_baseline_and_the_next_version_is_right() -> None:
    store = MemoryStore()
    formats = ["bf16", "fp8_block-round0.75"]
    with Publisher(store, RUN, formats=formats) as publisher:
        publisher.publish(masters(0), 0)
        real = store.put

        for failing in range(1, 12):

            def put(key: str, data: Any, *, if_absent: bool = False, left: list[int] = [failing]):  # noqa: B006
                left[0] -= 1
                if left[0] == 0:
                    real(key, data, if_absent=if_absent)
                    raise StoreUnavailableError("the reply was lost")
                return real(key, data, if_absent=if_absent)

            store.put = put  # type: ignore[method-assign]
            try:
                publisher.publish(masters(failing), failing)
            except StoreUnavailableError:
                pass
            finally:
                store.put = real  # type: ignore[method-assign]
            publisher.publish(masters(failing + 1), failing + 1)
            newest = Archive(store, RUN).newest()
            assert newest is not None
            previous = Archive(store, RUN, served_format=formats[1]).rebuild(newest.version - 1)
            before = {name: torch_of(b) for name, b in previous.items()}
            served = derive(masters(failing + 1), formats[1], previous=before)
            assert newest.view(formats[1]).root == root(served), failing


def torch_of(tensor: Any) -> torch.Tensor:
    from farcast.delta import from_bits

    made: torch.Tensor = from_bits(tensor, like=torch.empty(0))
    return made


def test_rollback_brings_back_every_format() -> None:
    store = MemoryStore()
    with Publisher(store, RUN, formats=["bf16", "int4_g32-round0.75"]) as publisher:
        for step in range(3):
            publisher.publish(masters(step), step)
        publisher.rollback(0)
    manifests = [Archive(store, RUN).manifest(version) for version in (0, 3)]
    for first, last in zip(manifests[0].views, manifests[1].views, strict=True):
        assert first.root == last.root


def test_garbage_keeps_what_any_format_needs() -> None:
    store = MemoryStore()
    with Publisher(store, RUN, formats=["bf16", "int8"], anchor_every=3) as publisher:
        for step in range(8):
            publisher.publish(masters(step), step)
        publisher.collect_garbage(keep=1, grace=0)
        for name in ("bf16", "int8"):
            assert rebuilt(store, 7, name) == bits(derive(masters(7), name))
    with pytest.raises(ConfigError, match="shows 'int8' alone"):
        find_garbage(Archive(store, RUN, served_format="int8"), keep=1)


def test_signed_versions_are_taken_in_any_format() -> None:
    store, signer = MemoryStore(), Signer.create()
    with Publisher(store, RUN, formats=["bf16", "int8"], signer=signer) as publisher:
        for step in range(3):
            publisher.publish(masters(step), step)
        subscriber = Subscriber(
            store, RUN, MemoryTarget(), served_format="int8", trusted_key=signer.public
        )
        assert subscriber.sync().root == root(derive(masters(2), "int8"))
        twin = clone(store)
        forged = twin.get("versions/000000000002.json", max_bytes=1 << 20).replace(b"int8", b"int9")
        twin.put("versions/000000000002.json", forged)
        with pytest.raises(Exception, match="not signed"):
            Archive(twin, RUN, served_format="int9", trusted=signer.public).manifest(2)


def test_masters_that_cannot_be_served_leave_the_run_as_it_was() -> None:
    store = MemoryStore()
    with Publisher(store, RUN, formats=["bf16", "int8"]) as publisher:
        publisher.publish(masters(0), 0)
        ruined = masters(1)
        ruined[f"{LAYER}.mlp.up_proj.weight"][0, 0] = float("nan")
        with pytest.raises(PoisonError, match="up_proj"):
            publisher.publish(ruined, 1)
        with pytest.raises(PoisonError, match="up_proj"):
            publisher.publish_async(ruined, 1)
        assert publisher.publish(masters(1), 1).version == 1


def test_a_model_of_which_nothing_would_be_quantised_is_refused() -> None:
    with (
        Publisher(MemoryStore(), RUN, formats=["bf16", "int8"]) as publisher,
        pytest.raises(ConfigError, match="Nothing would be quantised as int8"),
    ):
        publisher.publish({"transformer.h.0.w": torch.ones(4, 4)}, 0)


@pytest.mark.parametrize("formats", [["bf16", "bf16"], ["fp9"], "bf16", ["int8-scale1"]])
def test_formats_that_make_no_sense_are_refused(formats: Any) -> None:
    with pytest.raises(ConfigError):
        Publisher(MemoryStore(), RUN, formats=formats)
