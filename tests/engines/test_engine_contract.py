"""One contract for every kind of engine: what it serves is the version it says, or the one before.

`module` is a model in this process (what the transformers engine samples from), `folder` anything
that can load a folder, `sglang` a server that loads it on request, `group-N` an engine of N members
that is written in place, `vllm-routes` such a one behind vLLM's routes. The real vLLM is under
tests/vllm with the same questions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang import FakeSglang
from fake_vllm import FakeVllm
from group_engine import GroupEngine, Shard, as_torch, weights

from farcast.delta import TensorBits, to_bits
from farcast.engines.folder_engine import EngineFolder
from farcast.engines.http_client import HttpClient
from farcast.engines.live_engine import EngineTarget
from farcast.engines.sglang_engine import SglangEngine
from farcast.engines.vllm_engine import VllmEngine
from farcast.errors import FarcastError, TensorMismatchError
from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, Subscriber, Target, TorchModule
from farcast.store import MemoryStore
from farcast.types import VersionRef

RUN = "run1"


@dataclass
class Case:
    """An engine at version 0 of a run. `answer` depends on every word it would compute with."""

    target: Target
    answer: Callable[[], Any]
    fail_next: Callable[[], None]
    store: MemoryStore = field(default_factory=MemoryStore)
    refs: list[VersionRef] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.store, RUN)
        self.subscriber = Subscriber(self.store, RUN, self.target)
        self.publish()
        self.subscriber.sync()

    def publish(self, bits: Mapping[str, TensorBits] | None = None) -> VersionRef:
        number = len(self.refs)
        self.refs.append(self.publisher.publish(bits or weights(number), step=number))
        return self.refs[-1]


def write_folder(folder: Path, bits: Mapping[str, TensorBits]) -> Path:
    store = MemoryStore()
    Publisher(store, "other").publish(bits, step=0)
    Subscriber(store, "other", CheckpointDirectory(folder)).sync()
    (folder / ".farcast" / "state.json").unlink()
    return folder


def failing_once(owner: Any, name: str) -> Callable[[], None]:
    """Let the next call of a method do its work and fail then."""

    def arm() -> None:
        original = getattr(owner, name)

        def fail(*arguments: Any, **options: Any) -> Any:
            setattr(owner, name, original)
            original(*arguments, **options)
            raise OSError("A fault that a test wants.")

        setattr(owner, name, fail)

    return arm


@contextmanager
def module_case(_: Path) -> Iterator[Case]:
    module = torch.nn.Module()
    for name, tensor in as_torch(weights(0)):
        owner = torch.nn.Module()
        owner.weight = torch.nn.Parameter(tensor.clone(), False)
        module.add_module(name.removesuffix(".weight"), owner)
    target = TorchModule(module)

    def answer() -> Any:
        return {n: to_bits(t).data.tobytes() for n, t in module.state_dict().items()}

    yield Case(target, answer, failing_once(target, "_poke"))


@contextmanager
def folder_case(folder: Path) -> Iterator[Case]:
    target = CheckpointDirectory(write_folder(folder / "model", weights(0)))

    def answer() -> Any:
        fresh = CheckpointDirectory(folder / "model")
        (held,) = fresh.holdings() if fresh.ref is None else (fresh.entries,)
        return dict(held)

    yield Case(target, answer, failing_once(target, "_confirm"))


@contextmanager
def sglang_case(folder: Path) -> Iterator[Case]:
    model = write_folder(folder / "model", weights(0))
    with FakeSglang.started(model) as fake:
        engine = SglangEngine(HttpClient(fake.address))
        target = EngineFolder(engine, model, drops_caches=True)

        def fail() -> None:
            fake.broken_after = 3

        yield Case(target, lambda: fake.answer("a prompt"), fail)


@contextmanager
def group_case(folder: Path, members: int) -> Iterator[Case]:
    model = write_folder(folder / "model", weights(0))
    group = GroupEngine(members, weights(0))
    target = EngineTarget(group, model, scratch=folder / "scratch", caches="dropped")

    def fail() -> None:
        group.faults = {members - 1}

    case = Case(target, group.fingerprint, fail)
    original = group.undo

    def undo(label: str) -> None:
        group.faults = set()
        original(label)

    group.undo = undo  # type: ignore[method-assign]
    yield case


@contextmanager
def vllm_routes_case(folder: Path) -> Iterator[Case]:
    model = write_folder(folder / "model", weights(0))
    with FakeVllm.started(2, weights(0)) as fake:
        engine = VllmEngine(HttpClient(fake.address))
        target = EngineTarget(engine, model, scratch=folder / "scratch", caches="dropped")
        case = Case(target, fake.group.fingerprint, lambda: None)

        def fail() -> None:
            fake.faults = {1}
            close = engine.close_update

            def mend() -> None:
                fake.faults = set()
                close()

            engine.close_update = mend  # type: ignore[method-assign]

        case.fail_next = fail
        yield case


CASES: dict[str, Callable[[Path], Any]] = {
    "module": module_case,
    "folder": folder_case,
    "sglang": sglang_case,
    "vllm-routes": vllm_routes_case,
    **{f"group-{n}": lambda folder, n=n: group_case(folder, n) for n in (1, 2, 4)},
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    with CASES[request.param](tmp_path) as made:
        yield made


@pytest.fixture
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Any]:
    """The answer of an engine of the same kind that never held another version."""

    def answer(version: int) -> Any:
        with CASES[request.node.callspec.params["case"]](tmp_path / f"fresh-{version}") as made:
            made.publish(weights(version))
            made.subscriber.sync()
            return made.answer()

    return answer


def test_every_version_answers_as_a_fresh_engine(case: Case, fresh: Callable[[int], Any]) -> None:
    for version in (1, 2, 3):
        case.publish()
        assert case.subscriber.sync() == case.refs[version]
        assert case.answer() == fresh(version)
        assert case.target.verify() == case.refs[version].root


def test_equal_versions_answer_equally_whatever_came_between(case: Case) -> None:
    """Case 017: loading again changes nothing, and the way back is the way there."""
    answers = {0: case.answer()}
    for _ in range(2):
        case.publish()
        case.subscriber.sync()
        answers[case.refs[-1].version] = case.answer()
    assert len(set(map(str, answers.values()))) == 3
    for version in (2, 0, 1, 2):
        case.subscriber.sync(case.refs[version])
        assert case.answer() == answers[version]


def test_missed_versions_are_one_commit(case: Case) -> None:
    commits = case.subscriber.totals.versions
    for _ in range(3):
        case.publish()
    case.subscriber.sync()
    assert case.subscriber.totals.versions == commits + 1
    assert case.target.ref == case.refs[-1]


def test_staging_changes_no_answer(case: Case) -> None:
    before = case.answer()
    case.publish()
    staged = case.subscriber.stage()
    assert staged is not None
    assert case.answer() == before
    staged.discard()
    assert case.answer() == before
    assert case.target.verify() == case.refs[0].root


def test_a_commit_that_fails_is_undone_and_the_next_one_works(case: Case) -> None:
    before = case.answer()
    case.publish()
    staged = case.subscriber.stage()
    assert staged is not None
    case.fail_next()
    with pytest.raises((FarcastError, OSError)):
        case.subscriber.commit(staged)
    staged.discard()
    assert case.target.ref == case.refs[0]
    assert case.answer() == before
    assert case.subscriber.sync() == case.refs[1]
    assert case.answer() != before


def test_names_that_do_not_fit_are_all_listed(case: Case) -> None:
    """Case 013. A folder takes any tensors: there the engine that loads it decides."""
    if isinstance(case.target, CheckpointDirectory):
        pytest.skip("a folder holds whatever it is given")
    before = case.answer()
    bits = weights(1)
    bits["gate.w"] = bits.pop("gate.weight")
    case.publish(bits)
    with pytest.raises(TensorMismatchError, match=r"gate\.weight") as caught:
        case.subscriber.sync()
    assert "gate.w'" in str(caught.value)
    assert case.answer() == before


def test_a_change_of_one_fused_part_leaves_the_others(case: Case) -> None:
    """Case 029."""
    bits = {**weights(0), **{n: weights(3)[n] for n in ("q.weight", "gate.weight")}}
    case.publish(bits)
    case.subscriber.sync()
    assert case.target.verify() == case.refs[-1].root
    assert {n: case.target.read(n) for n in bits} == bits


def test_shards_hold_what_a_loader_of_their_own_would_have_loaded() -> None:
    """The world of this suite is right: the same loader fills models and is traced."""
    shard = Shard(1, 2)
    shard.load_weights(as_torch(weights(0)))
    q = dict(as_torch(weights(0)))["q.weight"]
    assert torch.equal(shard.qkv[:4], q[4:])
