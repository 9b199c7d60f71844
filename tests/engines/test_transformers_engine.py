"""The engine on a real (tiny) model: what it says a token's log-prob and version are is true."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from farcast import Publisher, Subscriber
from farcast.config import SamplingConfig, TaskConfig
from farcast.engines.base import Completion
from farcast.engines.chat import ChatCodec
from farcast.engines.following import Commit
from farcast.errors import IntegrityError, TargetUncertainError, UnknownVersionError
from farcast.replica.widened import WidenedModule
from farcast.store import open_store
from farcast.store.testing import FaultStore

torch = pytest.importorskip("torch")

from tests.models import tiny_folder, tiny_module  # noqa: E402

from farcast.engines.decoding import sample_logprobs  # noqa: E402
from farcast.engines.modules import empty_module  # noqa: E402
from farcast.engines.transformers_engine import TransformersEngine  # noqa: E402

TOLERANCE = 2e-4
"""float32 sums in another order: batch with padding and cache against one plain pass."""

PROMPTS = [(5, 9, 11), (5, 9, 11), (7, 3, 3, 8, 40), (20,)]


class World:
    """A trainer's side and an engine's side over one store."""

    def __init__(self) -> None:
        self.store = FaultStore(open_store("memory://"))
        self.module = tiny_module()
        self.publisher = Publisher(self.store, "run")
        self.commits: list[Commit] = []
        subscriber = Subscriber(self.store, "run", WidenedModule(empty_module(tiny_folder())))
        self.engine = TransformersEngine(
            subscriber.target.module,  # type: ignore[attr-defined]
            subscriber,
            eos_ids=(2,),
            pad_id=1,
            poll_seconds=0.02,
            on_commit=self.commits.append,
        )

    def publish(self, *, change: float = 0.0) -> Any:
        with torch.no_grad():
            for param in self.module.parameters():
                param.copy_((param * (1 + change)).to(torch.bfloat16))
        served = {n: p.detach().to(torch.bfloat16) for n, p in self.module.named_parameters()}
        return self.publisher.publish(served, 0)

    def wait_for(self, ref: Any) -> None:
        deadline = time.monotonic() + 10
        while self.engine.version != ref and time.monotonic() < deadline:
            self.engine.check()
            time.sleep(0.01)
        assert self.engine.version == ref

    def expected(
        self, prompt: Any, completion: Completion, sampling: SamplingConfig
    ) -> list[float]:
        """Log-probs of the completion by one plain pass of the trainer's module."""
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = self.module(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        rows = sample_logprobs(logits, sampling)
        return rows.gather(1, tokens[0, len(prompt) :, None])[:, 0].tolist()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.engine.close()
    made.publisher.close()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=12),
        SamplingConfig(max_new_tokens=12, temperature=0.7, top_p=0.6),
    ],
    ids=["plain", "nucleus"],
)
def test_logprobs_are_those_of_the_distribution_sampled(
    world: World, sampling: SamplingConfig
) -> None:
    ref = world.publish()
    world.engine.start()
    world.wait_for(ref)
    completions = world.engine.generate(PROMPTS, sampling, seed=3)
    assert len(completions) == len(PROMPTS)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.logprobs == pytest.approx(
            world.expected(prompt, completion, sampling), abs=TOLERANCE
        )
        (span,) = completion.spans
        assert (span.start, span.end) == (0, len(completion.token_ids))
        assert (span.version, span.root) == (ref.version, ref.root)


def test_same_seed_same_answers(world: World) -> None:
    ref = world.publish()
    world.engine.start()
    world.wait_for(ref)
    sampling = SamplingConfig(max_new_tokens=10)
    first, again, other = (world.engine.generate(PROMPTS, sampling, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[0] != first[1]  # members of a group differ


def test_a_commit_between_two_tokens_shows_in_the_spans(world: World) -> None:
    old = world.publish()
    world.engine.start()
    world.wait_for(old)
    new = None
    sampling = SamplingConfig(max_new_tokens=400)
    import threading

    def publish_soon() -> None:
        nonlocal new
        time.sleep(0.3)
        new = world.publish(change=0.02)

    thread = threading.Thread(target=publish_soon)
    thread.start()
    completions = world.engine.generate(PROMPTS, sampling, seed=5)
    thread.join()
    assert new is not None
    crossed = [c for c in completions if len(c.spans) == 2]
    assert crossed, "the answers ended before the commit; make them longer"
    for completion in crossed:
        first, second = completion.spans
        assert (first.version, first.root) == (old.version, old.root)
        assert (second.version, second.root) == (new.version, new.root)
        assert first.start == 0
        assert first.end == second.start
        assert second.end == len(completion.token_ids)
    assert world.commits[-1].ref == new
    assert world.commits[-1].pause_seconds < 1.0


def test_nothing_is_served_before_a_first_version(world: World) -> None:
    world.engine.start()
    with pytest.raises(UnknownVersionError, match="no verified version"):
        world.engine.generate(PROMPTS, SamplingConfig(max_new_tokens=2), seed=0)


def test_damaged_bytes_leave_the_old_version_serving(world: World) -> None:
    old = world.publish()
    world.engine.start()
    world.wait_for(old)
    before = world.engine.generate(PROMPTS, SamplingConfig(max_new_tokens=4), seed=0)
    subscriber = world.engine._subscriber
    staged = subscriber.stage

    def damaged(_: Any = None) -> Any:
        raise IntegrityError("damaged")

    subscriber.stage = damaged  # type: ignore[method-assign]
    world.publish(change=0.02)
    time.sleep(0.2)
    assert world.engine.version == old
    assert world.engine.generate(PROMPTS, SamplingConfig(max_new_tokens=4), seed=0) == before
    subscriber.stage = staged  # type: ignore[method-assign]


def test_an_uncertain_target_ends_serving(world: World) -> None:
    old = world.publish()
    world.engine.start()
    world.wait_for(old)

    def torn(_: Any) -> Any:
        raise TargetUncertainError("torn")

    world.engine._subscriber.commit = torn  # type: ignore[method-assign]
    world.publish(change=0.02)
    deadline = time.monotonic() + 5
    while world.engine.status().state != "failed" and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(TargetUncertainError, match="torn"):
        world.engine.generate(PROMPTS, SamplingConfig(max_new_tokens=2), seed=0)
    assert world.engine.status().state == "failed"


def test_chat_codec_round_trip() -> None:
    codec = ChatCodec.from_folder(tiny_folder(), TaskConfig(system="Be kind.", answer_prefix="So:"))
    ids = codec.encode_prompt("Say a.")
    assert codec.decode(ids) == "Be kind.\nSay a.\n>So:"
    assert codec.eos_ids == (2,)
    assert codec.pad_id == 1
