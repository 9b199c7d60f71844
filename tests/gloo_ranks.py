"""Ranks as processes that talk over gloo; each runs a function of this module.

    python -m tests.gloo_ranks FUNCTION RANKS FOLDER

imports torch once and forks the ranks, which meet through a file in FOLDER.
"""

import datetime
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.models import tiny_folder, tiny_module
from tests.train_world import TrainWorld
from torch.distributed.fsdp import fully_shard

from farcast.delta import entry_of, root_of, to_bits
from farcast.errors import RankLostError
from farcast.formats import canonical_names, served_bf16
from farcast.publish import Publisher
from farcast.publish.torch_comms import TorchComms
from farcast.store import open_store
from farcast.store.archive import Archive
from farcast.train.checkpoint import Checkpoints
from farcast.train.loop import Trainer
from farcast.train.policy import Policy
from farcast.train.sharding import shard
from farcast.train.team import Team
from farcast.trajectory import GroupBatcher, TrajectoryReceiver

RUN = "run"
PART_BYTES = 600
STEPS = 4


class Net(torch.nn.Module):
    """Odd sizes, so that shards are uneven; a plain parameter and a buffer beside the shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 16)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(3)])
        self.few = torch.nn.Linear(16, 3)
        self.gain = torch.nn.Parameter(torch.ones(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.gain
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.few(x)


def sharded_net() -> Net:
    torch.manual_seed(0)
    net = Net()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net, ignored_params={net.gain})
    return net


def served(net: Net) -> dict[str, Any]:
    tensors = {name: served_bf16(p) for name, p in net.named_parameters()}
    return tensors | dict(net.named_buffers())


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """The full tensors, gathered: only a test may do that."""
    names = canonical_names(tensors)
    return {
        names[name]: t.full_tensor() if hasattr(t, "full_tensor") else t
        for name, t in tensors.items()
    }


def one_step(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    ids = torch.randint(0, 37, (8,), generator=generator)
    net(ids).square().mean().backward()
    dist.all_reduce(net.gain.grad)
    optimizer.step()
    optimizer.zero_grad()
    net.steps += 1


def train(folder: Path) -> None:
    """Train and publish; rank 0 also publishes gathered tensors alone into another store."""
    net = sharded_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    publisher = Publisher(
        open_store(str(folder / "ranks")),
        RUN,
        part_bytes=PART_BYTES,
        anchor_every=3,
        comms=TorchComms(timeout=60),
        writer="w",
    )
    alone = None
    if dist.get_rank() == 0:
        alone = Publisher(
            open_store(str(folder / "alone")),
            RUN,
            part_bytes=PART_BYTES,
            anchor_every=3,
            writer="w",
        )
    for step in range(STEPS):
        if step:
            one_step(net, optimizer, step)
        tensors = served(net)
        job = publisher.publish_async(tensors, step)
        full = whole(tensors)  # collectives of the trainer, while the publish has its own
        ref = job.result(60)
        assert ref.root == root_of({name: entry_of(to_bits(t)) for name, t in full.items()})
        if alone is not None:
            assert alone.publish(full, step) == ref


FORMATS = ("bf16", "fp8_block", "nvfp4", "int4_g32")


class Decoder(torch.nn.Module):
    """Matrices called as a decoder's. 300 rows: between two ranks the border is inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 64)
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict() for _ in range(2)])
        for layer in self.layers:
            parts = {"up_proj": torch.nn.Linear(64, 300), "down_proj": torch.nn.Linear(300, 64)}
            layer["mlp"] = torch.nn.ModuleDict(parts)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            mlp = layer["mlp"]
            x = x + mlp["down_proj"](torch.tanh(mlp["up_proj"](x)))
        return x


def train_formats(folder: Path) -> None:
    """Like `train`, from fp32 masters in several served formats."""
    torch.manual_seed(0)
    net = Decoder()
    for layer in net.layers:
        fully_shard(layer["mlp"]["up_proj"])
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    told: dict[str, Any] = {"formats": FORMATS, "part_bytes": 4096, "writer": "w"}
    store = open_store(str(folder / "ranks"))
    publisher = Publisher(store, RUN, comms=TorchComms(timeout=60), **told)
    alone = None
    if dist.get_rank() == 0:
        alone = Publisher(open_store(str(folder / "alone")), RUN, **told)
    for step in range(3):
        if step:
            ids = torch.arange(8) + step + dist.get_rank()
            net(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        job = publisher.publish_async(dict(net.named_parameters()), step)
        full = whole(dict(net.named_parameters()))
        ref = job.result(60)
        if alone is not None:
            assert alone.publish(full, step) == ref


def lose_a_rank(folder: Path) -> None:
    """The last rank dies between two versions; the others must not wait for it for ever."""
    net = sharded_net()
    publisher = Publisher(open_store(str(folder / "ranks")), RUN, comms=TorchComms(timeout=2))
    publisher.publish(served(net), 0)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(0)
    for _ in range(2):
        try:
            publisher.publish(served(net), 1)
        except RankLostError:
            continue
        raise AssertionError("published without a rank")


def train_loop(folder: Path) -> None:
    """The trainer's loop on a sharded policy: stopped after one step of two, and resumed. The
    folder's name is the optimizer's."""
    rank = dist.get_rank()
    for stop_at in (1, 2):
        world = TrainWorld(
            folder / f"rank-{rank}", store=str(folder / "store"), steps=2, optimizer=folder.name
        )
        policy = Policy(shard(tiny_module()), world.config)
        publisher = Publisher(world.store, RUN, comms=TorchComms(timeout=60))
        team = Team(TorchComms(timeout=60))
        trainer = looping(world, policy, publisher, team, stop_at)
        if trainer.resume():
            assert trainer.step == 1
        else:
            zero = publisher.publish(policy.served(), 0)
            if team.leads:
                world.send(zero, groups=5)
        trainer.run()
        assert trainer.step == stop_at
        publisher.close()
        if team.leads:
            lines = [
                f"{r.step} {r.published.ref.version} {r.root} {r.loss:.6f} {r.grad_norm:.6f} "
                f"{','.join(r.consumed)}\n"
                for r in world.reports
            ]
            with (folder / "reports").open("a") as file:
                file.writelines(lines)


def looping(
    world: TrainWorld, policy: Policy, publisher: Publisher, team: Team, stop_at: int
) -> Trainer:
    archive = Archive(world.store, RUN)
    trainer = Trainer(
        policy,
        world.config,
        run_id=RUN,
        publisher=publisher,
        receiver=TrajectoryReceiver(world.store, RUN),
        batcher=GroupBatcher(RUN, max_staleness=100, group_timeout=60.0),
        checkpoints=Checkpoints(world.folder, RUN),
        root_of=lambda version: archive.manifest(version).root,
        report=world.reports.append,
        stop=lambda: trainer.step >= stop_at,
        team=team,
    )
    return trainer


def run_ranks(function: str, ranks: int, folder: Path) -> list[int]:
    """Run `function` on `ranks` processes; their exit statuses."""
    command = [sys.executable, "-m", "tests.gloo_ranks", function, str(ranks), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def _rank(function: str, rank: int, ranks: int, folder: Path) -> int:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    FUNCTIONS[function](folder)
    return 0


def main() -> None:
    function, ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    tiny_folder()  # once, before there are several
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = _rank(function, rank, ranks, folder)
            except BaseException:  # noqa: BLE001 - a fork must not return into its parent
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


FUNCTIONS = {
    "train": train,
    "train_formats": train_formats,
    "train_loop": train_loop,
    "lose_a_rank": lose_a_rank,
}


if __name__ == "__main__":
    main()
