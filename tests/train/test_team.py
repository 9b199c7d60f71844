"""What ranks of a trainer tell each other: groups arrive as they were, and nobody decides alone."""

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.models import tiny_module  # noqa: E402
from tests.train_world import RUN, TrainWorld, trajectory  # noqa: E402

from farcast.errors import ConfigError, RankError, StoreUnavailableError  # noqa: E402
from farcast.train.checkpoint import Checkpoints, CheckpointState  # noqa: E402
from farcast.train.objectives import objective_of  # noqa: E402
from farcast.train.packing import pack_group  # noqa: E402
from farcast.train.policy import Policy  # noqa: E402
from farcast.train.team import Team  # noqa: E402
from farcast.train.update import _share, step_size, update  # noqa: E402
from farcast.trajectory import Group  # noqa: E402
from farcast.types import VersionRef  # noqa: E402
from shard_world import Meeting, ThreadComms, on_ranks  # noqa: E402

REF = VersionRef(RUN, 3, "0" * 64)


def groups(count: int = 3) -> list[Group]:
    rng = random.Random(1)
    return [
        Group(
            f"g{n}",
            tuple(trajectory(f"g{n}", i, REF, reward=float(i % 2), rng=rng) for i in range(4)),
        )
        for n in range(count)
    ]


def teams(size: int) -> list[Team]:
    meeting = Meeting(size)
    return [Team(ThreadComms(meeting, rank)) for rank in range(size)]


def test_everybody_gets_the_groups_that_the_leader_chose() -> None:
    chosen: list[Any] = ["waiting", groups(), None]
    ranks = teams(3)

    def never() -> Any:
        raise AssertionError("Only the leader chooses.")

    for choice in chosen:
        got = on_ranks(
            3, lambda r, c=choice: ranks[r].choose((lambda: c) if r == 0 else never, RUN)
        )
        for other in got:
            if isinstance(choice, list):
                assert [g.group_id for g in other] == [g.group_id for g in choice]
                for mine, theirs in zip(other, choice, strict=True):
                    for a, b in zip(mine.members, theirs.members, strict=True):
                        assert (a.id, a.token_ids, a.spans, a.reward, a.loss_mask) == (
                            (b.id, b.token_ids, b.spans, b.reward, b.loss_mask)
                        )
                        # What the trainer computes with is float32.
                        assert torch.equal(torch.tensor(a.logprobs), torch.tensor(b.logprobs))
            else:
                assert other == choice


def test_a_leader_that_fails_tells_the_others() -> None:
    ranks = teams(2)

    def fails() -> Any:
        raise StoreUnavailableError("The store is away.")

    got = on_ranks(2, lambda rank: ranks[rank].choose(fails, RUN))
    assert isinstance(got[0], StoreUnavailableError)
    assert isinstance(got[1], RankError)
    assert "The store is away." in str(got[1])


def test_every_pack_is_computed_once_and_all_ranks_compute_as_many() -> None:
    packs = [pack for g in groups() for pack in pack_group(g.members, [1.0] * 4, version=3, most=8)]
    for size in (1, 2, 3, 5):
        shares = [_share(packs, team) for team in teams(size)]
        assert len({len(share) for share in shares}) == 1
        counted = [id(pack) for share in shares for pack, counts in share if counts]
        assert sorted(counted) == sorted(map(id, packs))
    assert _share([], Team()) == []


def test_the_shares_of_two_ranks_add_up_to_the_gradient_of_one(tmp_path: Path) -> None:
    """Without FSDP here, so the sum over ranks is taken by hand: it is `size` times the mean."""
    config = TrainWorld(tmp_path).config
    members = [g.members for g in groups()]
    size = step_size(members, version=3, bound=None)
    assert size.answers == 12

    class Frozen(Policy):
        def step(self, step: int) -> float:
            return float(step)

    modules = [tiny_module() for _ in range(3)]  # transformers loads one at a time

    def gradients(team: Team, module: Any) -> tuple[Any, Any]:
        policy = Frozen(module, config)
        report = update(policy, members, objective_of(config), config, version=3, step=1, team=team)
        return report, [p.grad for p in policy.module.parameters()]

    alone, expected = gradients(Team(), modules[2])
    ranks = teams(2)
    halves = on_ranks(2, lambda rank: gradients(ranks[rank], modules[rank]))
    for report, _ in halves:
        assert report.loss == pytest.approx(alone.loss, abs=1e-5)
        assert report._replace(loss=0, kl=0) == alone._replace(loss=0, kl=0)
    for first, second, whole in zip(halves[0][1], halves[1][1], expected, strict=True):
        assert torch.allclose((first + second) / 2, whole, atol=1e-5)


def test_a_resumed_team_takes_the_newest_step_that_all_have(tmp_path: Path) -> None:
    def save(rank: int, step: int) -> None:
        world = TrainWorld(tmp_path / str(rank))
        state = CheckpointState(
            run_id=RUN, step=step, version=0, root="0" * 64, receiver={}, batcher=b""
        )
        Checkpoints(world.folder, RUN).save(state, {"a": torch.zeros(1)})

    for rank, steps in ((0, (1, 2)), (1, (2, 3))):
        for step in steps:
            save(rank, step)
    ranks = teams(2)
    folders = [Checkpoints(tmp_path / str(rank), RUN) for rank in range(2)]
    assert on_ranks(2, lambda r: ranks[r].common(folders[r].steps())) == [[2], [2]]
    folders[1].discard_after(2)
    assert folders[1].steps() == [2]


def test_ranks_without_a_common_step_do_not_begin_anew(tmp_path: Path) -> None:
    ranks = teams(2)

    worlds = [TrainWorld(tmp_path / str(rank)) for rank in range(2)]
    trainers = [world.trainer(team=ranks[rank]) for rank, world in enumerate(worlds)]

    def resume(rank: int) -> Any:
        world, (trainer, policy, publisher) = worlds[rank], trainers[rank]
        publisher.publish(policy.served(), 0)
        if rank == 0:
            state = CheckpointState(
                run_id=RUN, step=1, version=0, root="0" * 64, receiver={}, batcher=b""
            )
            Checkpoints(world.folder, RUN).save(state, policy.state())
        return trainer.resume()

    got = on_ranks(2, resume)
    assert all(isinstance(error, ConfigError) for error in got), got
