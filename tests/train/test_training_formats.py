"""The trainer serves every step in several formats, and takes what replicas of any of them sent."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.models import tiny_module  # noqa: E402
from tests.train_world import RUN, TrainWorld  # noqa: E402

from farcast import Publisher  # noqa: E402
from farcast.config import LoraConfig, TrainConfig  # noqa: E402
from farcast.delta import entry_of, root_of, to_bits  # noqa: E402
from farcast.fleet.trainer_process import root_reader  # noqa: E402
from farcast.formats.deriving import derive  # noqa: E402
from farcast.store.archive import Archive  # noqa: E402
from farcast.train.loop import to_publish  # noqa: E402
from farcast.train.lora import add_lora  # noqa: E402
from farcast.train.policy import Policy, served_root  # noqa: E402

FORMATS = ("bf16", "fp8_block", "int4_g32-scale1.5-round0.75")


def root(served: dict[str, Any]) -> str:
    return root_of({name: entry_of(to_bits(tensor)) for name, tensor in served.items()})


def test_steps_are_served_in_every_format_and_sampled_in_any(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path)
    archive = Archive(world.store, RUN)
    publisher = Publisher(world.store, RUN, formats=FORMATS)
    trainer, policy, _ = world.trainer(publisher=publisher, root_of=root_reader(archive))
    publisher.publish(to_publish(policy, publisher), 0)
    for served_format in FORMATS:
        sampled = Archive(world.store, RUN, served_format=served_format).manifest(0).ref
        world.send(sampled, groups=2)
    trainer.run()
    assert [report.step for report in world.reports] == [1, 2, 3]
    assert not any(report.dropped for report in world.reports)
    last = archive.manifest(3)
    assert last.served_formats == FORMATS
    assert last.root == world.reports[-1].root == served_root(policy.served())
    masters = {name: m.clone() for name, m in policy.masters().items()}
    assert last.view("fp8_block").root == root(derive(masters, "fp8_block"))
    changed = {view.served_format: view.changed for view in last.views}
    assert all(changed.values())


def test_a_root_of_no_format_is_invalid(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=1, groups_per_step=1)
    archive = Archive(world.store, RUN)
    publisher = Publisher(world.store, RUN, formats=FORMATS)
    trainer, policy, _ = world.trainer(publisher=publisher, root_of=root_reader(archive))
    ref = publisher.publish(to_publish(policy, publisher), 0)
    forged = world.send(type(ref)(ref.run_id, 0, "0" * 64))
    world.send(ref)
    trainer.run()
    assert {tuple(names) for names in world.reports[0].dropped.values()} == {tuple(forged)}


@pytest.mark.parametrize("adapted", [False, True])
def test_masters_rounded_are_what_is_served(adapted: bool) -> None:
    module = tiny_module()
    if adapted:
        add_lora(module, LoraConfig(rank=2), seed=1)
        with torch.no_grad():
            for name, param in module.named_parameters():
                if "lora_" in name:
                    param.normal_()
    policy = Policy(module, TrainConfig(lora=LoraConfig(rank=2) if adapted else None))
    assert root(derive(policy.masters(), "bf16")) == served_root(policy.served())
