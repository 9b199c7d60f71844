"""Packing, the policy and the loop, on a tiny real model."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

from tests.models import tiny_module  # noqa: E402
from tests.train_world import RUN, TrainWorld, trajectory  # noqa: E402

from farcast import Publisher, TrajectoryReceiver  # noqa: E402
from farcast.errors import (  # noqa: E402
    ConfigError,
    FormatError,
    IntegrityError,
    RunMismatchError,
)
from farcast.store.archive import Archive  # noqa: E402
from farcast.store.testing import FaultStore, FlipBit, Rule  # noqa: E402
from farcast.train.checkpoint import Checkpoints, CheckpointState  # noqa: E402
from farcast.train.objectives import objective_of  # noqa: E402
from farcast.train.packing import pack_group, shared_length  # noqa: E402
from farcast.train.policy import Policy, served_root  # noqa: E402
from farcast.train.update import step_size, update  # noqa: E402
from farcast.trajectory import RoutedExperts, Trajectory  # noqa: E402
from farcast.types import PolicySpan, VersionRef  # noqa: E402

REF = VersionRef(RUN, 0, "0" * 64)


def members(count: int = 4) -> list[Any]:
    rng = random.Random(1)
    return [trajectory("g", i, REF, reward=float(i % 2), rng=rng) for i in range(count)]


def alone(module: Any, member: Any) -> list[float]:
    """Log-probs of a member's loss tokens by a plain pass over it alone."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([member.token_ids])).logits[0].float()
    rows = torch.log_softmax(logits[:-1], -1)
    return [
        float(rows[i - 1, member.token_ids[i]])
        for i in range(1, len(member.token_ids))
        if member.loss_mask[i]
    ]


@pytest.mark.parametrize("most", [2048, 8], ids=["one pack", "split"])
def test_packed_members_get_the_logprobs_they_have_alone(tmp_path: Path, most: int) -> None:
    policy = Policy(tiny_module(), TrainWorld(tmp_path).config)
    group = members()
    packs = list(pack_group(group, [0.0] * 4, version=0, most=most))
    assert (len(packs) > 1) == (most == 8)
    packed = torch.cat([policy.logprobs(pack) for pack in packs]).tolist()
    expected = [value for member in group for value in alone(policy.module, member)]
    assert packed == pytest.approx(expected, abs=2e-4)


def test_members_that_diverge_inside_the_prompt_share_only_what_is_equal() -> None:
    group = members(2)
    other = replace(group[1], token_ids=(5, 6, 99, *group[1].token_ids[3:]))
    assert shared_length(group) == 4
    assert shared_length([group[0], other]) == 2


def test_tools_and_observations_stay_out_of_the_loss(tmp_path: Path) -> None:
    policy = Policy(tiny_module(), TrainWorld(tmp_path).config)
    long = replace(
        members(1)[0],
        token_ids=(5, 6, 7, 8, 20, 21, 30, 31, 22),
        logprobs=(0.0,) * 4 + (-1.0, -1.0, 0.0, 0.0, -1.0),
        loss_mask=(False,) * 4 + (True, True, False, False, True),
    )
    (pack,) = pack_group([long], [1.0], version=0)
    assert pack.targets.tolist() == [20, 21, 22]
    assert policy.logprobs(pack).tolist() == pytest.approx(alone(policy.module, long), abs=2e-4)


def test_a_step_moves_served_weights_and_a_poisoned_gradient_moves_none(tmp_path: Path) -> None:
    policy = Policy(tiny_module(), TrainWorld(tmp_path).config)
    before = served_root(policy.served())
    for param in policy.module.parameters():
        param.grad = torch.full_like(param, float("nan"))
    policy.step(1)
    assert served_root(policy.served()) == before
    config = TrainWorld(tmp_path).config
    update(policy, [members()], objective_of(config), config, version=0, step=2)
    assert served_root(policy.served()) != before
    for param in policy.module.parameters():  # what is served is exactly what is computed with
        assert torch.equal(param, param.to(torch.bfloat16).float())


def test_every_step_is_a_version_whose_root_is_the_trainers_own(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=3)
    trainer, policy, publisher = world.trainer()
    zero = publisher.publish(policy.served(), 0)
    world.send(zero, groups=6)
    trainer.run()
    assert [r.step for r in world.reports] == [1, 2, 3]
    assert [r.published.ref.version for r in world.reports] == [1, 2, 3]
    archive = Archive(world.store, RUN)
    for report in world.reports:
        assert report.root == report.published.ref.root
        assert archive.restore(report.published.ref.version).ref.root == report.root
    assert [r.staleness_max for r in world.reports] == [0, 1, 2]
    assert len({i for r in world.reports for i in r.consumed}) == 24


def test_stale_groups_are_dropped_and_named(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=2, max_staleness=0)
    trainer, policy, publisher = world.trainer()
    zero = publisher.publish(policy.served(), 0)
    first = world.send(zero, groups=4)
    calls = []

    def idle() -> None:
        if not calls and publisher.newest.version == 1:
            calls.append(world.send(publisher.newest, groups=2))

    trainer._idle = idle  # type: ignore[method-assign]
    trainer.run()
    assert set(world.reports[0].consumed) == set(first[:8])
    dropped = {i for r in world.reports for i in r.dropped.get("stale", ())}
    assert dropped == set(first[8:])
    assert set(world.reports[1].consumed) == set(calls[0])


def test_resuming_gives_the_same_run(tmp_path: Path) -> None:
    whole = TrainWorld(tmp_path / "whole", steps=4)
    trainer, policy, publisher = whole.trainer()
    whole.send(publisher.publish(policy.served(), 0), groups=8)
    trainer.run()

    parts = TrainWorld(tmp_path / "parts", steps=4)
    trainer, policy, publisher = parts.trainer()
    parts.send(publisher.publish(policy.served(), 0), groups=8)
    for stop_at in (1, 3, 4):
        trainer._stop = lambda at=stop_at, t=trainer: t.step >= at  # type: ignore[method-assign,misc]
        trainer.run()
        publisher.close()
        trainer, policy, publisher = parts.trainer()
        assert trainer.resume()
        assert trainer.step == stop_at
    assert [r.root for r in parts.reports] == [r.root for r in whole.reports]
    assert [r.consumed for r in parts.reports] == [r.consumed for r in whole.reports]
    assert [r.published.ref.version for r in parts.reports] == [1, 2, 3, 4]


def test_a_lost_step_is_published_under_the_next_number(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=3, checkpoint_every=2)
    trainer, policy, publisher = world.trainer()
    zero = publisher.publish(policy.served(), 0)
    world.send(zero, groups=6)
    trainer._stop = lambda: trainer.step >= 2  # type: ignore[method-assign]
    trainer.run()
    publisher.publish({n: t + 1 for n, t in policy.served().items()}, 3)  # then the crash
    publisher.close()

    trainer, policy, publisher = world.trainer()
    assert trainer.resume()
    assert trainer.step == 2
    trainer.run()
    assert world.reports[-1].step == 3
    assert world.reports[-1].published.ref.version == 4
    consumed = [i for r in world.reports for i in r.consumed]
    assert len(consumed) == len(set(consumed)) == 24


def test_publishing_errors_stop_the_run_at_its_checkpoint(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=3)
    trainer, policy, publisher = world.trainer()
    world.send(publisher.publish(policy.served(), 0), groups=6)
    rival = Publisher(world.store, RUN)

    def idle_after_first(report: Any) -> None:
        world.reports.append(report)
        rival_tensors = {n: t + 1 for n, t in policy.served().items()}
        rival._base = rival._reloaded(None) if report.step == 1 else rival._base
        rival.publish(rival_tensors, 99)

    trainer._report = idle_after_first  # type: ignore[method-assign]
    from farcast.errors import VersionConflictError

    with pytest.raises(VersionConflictError):
        trainer.run()


def saved(folder: Path, policy: Policy, step: int = 1) -> Checkpoints:
    checkpoints = Checkpoints(folder, RUN)
    state = CheckpointState(
        run_id=RUN, step=step, version=1, root="0" * 64, receiver={}, batcher=b""
    )
    checkpoints.save(state, policy.state())
    return checkpoints


def test_checkpoints_are_verified_and_the_newest_two_kept(tmp_path: Path) -> None:
    policy = Policy(tiny_module(), TrainWorld(tmp_path).config)
    for step in (1, 2, 3):
        checkpoints = saved(tmp_path, policy, step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000000000002", "step-000000000003"]
    loaded = checkpoints.load()
    assert loaded is not None
    for name, tensor in policy.state().items():
        assert torch.equal(loaded[1][name], tensor)
    path = tmp_path / names[-1] / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(IntegrityError, match="damaged"):
        checkpoints.load()
    with pytest.raises(RunMismatchError, match="is of run run, not other"):
        Checkpoints(tmp_path, "other").load()


def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(tiny_module(), TrainWorld(tmp_path).config)
    checkpoints = saved(tmp_path, policy, 1)

    def full(*_: Any, **__: Any) -> None:
        from safetensors import SafetensorError

        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        saved(tmp_path, policy, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded[0].step == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    policy = Policy(tiny_module(), TrainWorld(tmp_path).config)
    tensors = dict(policy.state())
    tensors.pop(next(iter(tensors)))
    with pytest.raises(FormatError, match="does not fit this model"):
        policy.restore(tensors)


def test_a_token_of_an_old_span_stays_out_and_its_neighbours_do_not(tmp_path: Path) -> None:
    """The first half of each answer was written by version 1, the rest by version 5."""
    config = TrainWorld(tmp_path, mask_staleness=2).config
    group = [
        replace(
            m, spans=(PolicySpan(4, 5, 1, "0" * 64), PolicySpan(5, len(m.token_ids), 5, "1" * 64))
        )
        for m in members()
    ]
    (pack,) = pack_group(group, [1.0, -1.0, 1.0, -1.0], version=6)
    assert sorted(set(pack.ages.tolist())) == [1, 5]
    answers = [len(m.token_ids) - 4 for m in group]
    assert pack.lengths.tolist() == [n for n in answers for _ in range(n)]
    assert step_size([group], version=6, bound=2).tokens == sum(answers) - 4
    policy = Policy(tiny_module(), config)
    report = update(policy, [group], objective_of(config), config, version=6, step=1)
    assert (report.masked, report.tokens) == (4, sum(answers))


def _breaks_at(module: Any, token: int) -> None:
    """What the model computes from `token` on is not a number."""

    def hook(_: Any, inputs: Any, output: Any) -> Any:
        return output.masked_fill((inputs[0] == token)[..., None], float("nan"))

    module.get_input_embeddings().register_forward_hook(hook)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_sample_that_the_model_cannot_compute_is_left_out_alone(
    tmp_path: Path, updates: int
) -> None:
    """The step is the one that the other members' tokens make."""
    config = TrainWorld(tmp_path, updates_per_step=updates, learning_rate=1e-3).config
    group = members()
    used = {token for member in group for token in member.token_ids}
    module = tiny_module()
    odd = next(t for t in range(module.config.vocab_size) if t not in used)
    group[1] = replace(group[1], token_ids=(*group[1].token_ids[:4], odd, *group[1].token_ids[5:]))
    _breaks_at(module, odd)
    policy = Policy(module, config)
    before = served_root(policy.served())
    report = update(policy, [group], objective_of(config), config, version=0, step=1)
    assert report.left_out == sum(group[1].loss_mask)
    assert report.entered == sum(sum(m.loss_mask) for m in group) - report.left_out
    assert 0 < report.grad_norm < float("inf")
    assert 0 < report.largest_ratio < float("inf")
    assert served_root(policy.served()) != before
    assert all(bool(t.isfinite().all()) for t in policy.served().values())


def test_where_no_sample_can_be_computed_nothing_changes(tmp_path: Path) -> None:
    config = TrainWorld(tmp_path).config
    module = tiny_module()
    _breaks_at(module, members()[0].token_ids[0])  # in the prompt that all share
    policy = Policy(module, config)
    before = served_root(policy.served())
    report = update(policy, [members()], objective_of(config), config, version=0, step=1)
    assert (report.entered, report.left_out) == (0, report.tokens)
    assert served_root(policy.served()) == before


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "tis", "decoupled", "reinforce"])
def test_every_objective_trains_for_several_updates_a_step(tmp_path: Path, name: str) -> None:
    config = TrainWorld(tmp_path, objective=name, updates_per_step=2, learning_rate=1e-4).config
    policy = Policy(tiny_module(), config)
    before = served_root(policy.served())
    report = update(policy, [members()], objective_of(config), config, version=0, step=1)
    assert served_root(policy.served()) != before
    assert report.grad_norm > 0
    assert report.left_out == 0


def test_muon_takes_hidden_matrices_at_the_scale_of_adamw(tmp_path: Path) -> None:
    config = TrainWorld(tmp_path, optimizer="muon", learning_rate=1e-2, muon_momentum=0.0).config
    module = tiny_module()
    policy = Policy(module, config)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    policy.step(1)
    state = policy.state()
    hidden = {n.removeprefix("momentum_buffer/") for n in state if n.startswith("momentum_buffer/")}
    assert "model.layers.0.mlp.up_proj.weight" in hidden
    assert not any("embed" in name or "norm" in name or "head" in name for name in hidden)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"):
        moved = (module.get_parameter(name) - before[name]).square().mean().sqrt()
        # Moonlight: an orthogonal update of 0.2 sqrt(max(a, b)) has RMS near AdamW's 0.2.
        low, high = (0.1, 0.3) if name in hidden else (0.9, 1.1)
        assert low < float(moved) / config.learning_rate < high


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_goes_on_from_its_checkpoint(tmp_path: Path, optimizer: str) -> None:
    config = TrainWorld(tmp_path, optimizer=optimizer).config
    objective = objective_of(config)
    policy, other = Policy(tiny_module(), config), Policy(tiny_module(), config)
    update(policy, [members()], objective, config, version=0, step=1)
    other.restore({name: tensor.clone() for name, tensor in policy.state().items()})
    for one in (policy, other):
        update(one, [members()], objective, config, version=1, step=2)
    assert served_root(policy.served()) == served_root(other.served())
    rest = "muon" if optimizer == "adamw" else "adamw"
    stranger = Policy(tiny_module(), TrainWorld(tmp_path, optimizer=rest).config)
    with pytest.raises(FormatError, match="another optimizer"):
        stranger.restore(policy.state())


# --- what workers may send -----------------------------------------------------------------------


def test_a_broken_batch_is_passed_over_and_named(tmp_path: Path) -> None:
    """One damaged object must not hold the run, after a resume neither."""
    world = TrainWorld(tmp_path, steps=2)
    skipped: list[tuple[str, int]] = []
    trainer, policy, publisher = world.trainer(
        skipped=lambda error: skipped.append((error.worker_id, error.sequence))
    )
    zero = publisher.publish(policy.served(), 0)
    world.send(zero, groups=1)
    world.store.put("trajectories/w/000000000001", b"\x80\x04garbage", if_absent=True)
    world.send(zero, groups=4)
    trainer.run()
    assert skipped == [("w", 1)]
    assert [r.step for r in world.reports] == [1, 2]


def test_a_batch_that_is_damaged_only_on_its_way_is_not_lost(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=1)
    faulty = FaultStore(world.store)
    faulty.add(Rule(FlipBit(999), verb="get", prefix="trajectories/", times=2))
    skipped: list[Any] = []
    trainer, policy, publisher = world.trainer(
        skipped=skipped.append, receiver=TrajectoryReceiver(faulty, RUN)
    )
    sent = world.send(publisher.publish(policy.served(), 0), groups=2)
    trainer.run()
    assert skipped == []
    assert sorted(world.reports[0].consumed) == sorted(sent)


@pytest.mark.parametrize("tokens", [{"token_ids": (5, 6, 7, 8, 1 << 30)}, {"size": 4000}])
def test_what_the_model_cannot_compute_with_is_dropped(
    tmp_path: Path, tokens: dict[str, Any]
) -> None:
    """A worker with another tokenizer, or a text longer than the model has places."""
    world = TrainWorld(tmp_path, steps=1)
    trainer, policy, publisher = world.trainer()
    zero = publisher.publish(policy.served(), 0)
    size = tokens.get("size", 5)
    ids = tokens.get("token_ids", (5,) * size)
    bad = replace(
        trajectory("bad", 0, zero, reward=1.0, rng=world.rng),
        token_ids=ids,
        logprobs=(0.0,) * size,
        loss_mask=(False,) * 4 + (True,) * (size - 4),
        spans=(PolicySpan(4, size, 0, zero.root),),
        turns=(),
    )
    assert not policy.fits(bad)
    huge = trajectory("huge", 0, zero, reward=1e300, rng=world.rng)
    world.sender.submit_many((bad, huge))
    world.send(zero, groups=2)
    trainer.run()
    assert world.reports[0].dropped == {"invalid": ("bad-0", "huge-0")}


def test_a_group_of_one_gives_numbers_that_a_record_can_hold(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=1, groups_per_step=1)
    trainer, policy, publisher = world.trainer()
    zero = publisher.publish(policy.served(), 0)
    world.sender.submit(trajectory("lone", 0, zero, reward=1e15, rng=world.rng, size=1))
    trainer.run()
    (report,) = world.reports
    assert report.reward_std == 0.0
    assert math.isfinite(report.reward_mean)


def test_a_checkpoint_is_not_resumed_on_a_store_without_its_version(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=1)
    trainer, policy, publisher = world.trainer()
    world.send(publisher.publish(policy.served(), 0), groups=2)
    trainer.run()
    other = TrainWorld(tmp_path, steps=2)
    with pytest.raises(RunMismatchError, match="no version"):
        other.trainer()[0].resume()
    again, policy, publisher = other.trainer()
    publisher.publish(policy.served(), 0)
    publisher.publish({k: t * 2 for k, t in policy.served().items()}, 1)
    with pytest.raises(RunMismatchError, match="not the one"):
        again.resume()


def test_groups_routed_by_models_of_other_shapes_end_no_run_also_on_resume(tmp_path: Path) -> None:
    """One arrives before a checkpoint, one lies across it: half before, half after."""

    def routed(group: str, member: int, layers: int) -> Trajectory:
        one = trajectory(group, member, zero, reward=float(member), rng=world.rng, size=2)
        ids = bytes(len(one.token_ids) * layers)
        return replace(one, experts=RoutedExperts(layers=layers, top_k=1, width=1, ids=ids))

    world = TrainWorld(tmp_path, steps=2)
    trainer, policy, publisher = world.trainer()
    zero = publisher.publish(policy.served(), 0)
    world.sender.submit_many([routed("mixed", 0, 1), routed("mixed", 1, 2), routed("across", 0, 1)])
    world.sender.submit_many([routed("alone", 0, 3), routed("alone", 1, 3)])
    world.send(zero, groups=1)
    trainer._stop = lambda: trainer.step >= 1  # type: ignore[method-assign]
    trainer.run()
    publisher.close()
    again, _, _ = world.trainer()
    assert again.resume()
    world.sender.submit_many([routed("across", 1, 2)])
    world.send(zero, groups=2)
    again.run()
    assert [r.dropped.get("invalid", ()) for r in world.reports] == [
        ("mixed-0", "mixed-1"),
        ("across-0", "across-1"),
    ]
    assert {name.partition("-")[0] for name in world.reports[0].consumed} == {"alone", "g0"}
    assert {name.partition("-")[0] for name in world.reports[1].consumed} == {"g1", "g2"}
