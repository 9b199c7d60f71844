"""PublishCallback under a real `transformers.Trainer`: replicas get the trainer's bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerState, TrainingArguments

from farcast import Publisher, Subscriber, TorchModule
from farcast.delta import entry_of, root_of, to_bits
from farcast.errors import ConfigError, PoisonError, StoreUnavailableError
from farcast.interop.transformers import PublishCallback, served_tensors
from farcast.store import open_store
from farcast.store.archive import Archive
from farcast.store.base import Store
from farcast.store.testing import Call, Fail, FaultStore

RUN = "run"


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
    )


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (index + 1)) % 64
        return {"input_ids": ids, "labels": ids}


def train(module: Any, callback: PublishCallback, folder: Path, steps: int = 4) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(module, arguments, train_dataset=Tokens(), callbacks=[callback])
    trainer.train()
    return trainer


def root_of_module(module: Any) -> str:
    return root_of({n: entry_of(to_bits(t)) for n, t in served_tensors(module).items()})


def test_a_replica_of_any_trainer_holds_its_bits(tmp_path: Path) -> None:
    store, trained = open_store(tmp_path / "store"), model()
    train(trained, PublishCallback(Publisher(store, RUN)), tmp_path)

    replica = model().to(torch.bfloat16)
    ref = Subscriber(store, RUN, TorchModule(replica)).sync()
    assert ref.version == 4
    assert [Archive(store, RUN).manifest(v).step for v in range(5)] == [0, 1, 2, 3, 4]
    for (name, theirs), ours in zip(replica.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(theirs, ours.detach().to(torch.bfloat16)), name
    assert ref.root == root_of_module(trained)


def test_every_other_step_and_always_the_last(tmp_path: Path) -> None:
    store = open_store("memory://")
    train(model(), PublishCallback(Publisher(store, RUN), every=2), tmp_path, steps=5)
    archive = Archive(store, RUN)
    assert [archive.manifest(v).step for v in range(4)] == [0, 2, 4, 5]


def test_an_outage_costs_versions_and_no_step(tmp_path: Path) -> None:
    memory, down = open_store("memory://"), False

    def decide(_: Call) -> Fail | None:
        return Fail(StoreUnavailableError("The store is away; try again.")) if down else None

    class Outage(PublishCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any):
            nonlocal down
            self._overlapped.settle()
            down = state.global_step == 2
            super().on_step_end(args, state, control, model=model)
            self._overlapped.settle()
            down = False

    trained = model()
    callback = Outage(Publisher(FaultStore(memory, decide=decide), RUN))
    train(trained, callback, tmp_path)
    assert callback.failures == 1
    newest = Archive(memory, RUN).newest()
    assert newest is not None
    assert (newest.version, newest.step, newest.root) == (3, 4, root_of_module(trained))


def test_what_will_not_pass_ends_the_training(tmp_path: Path) -> None:
    class Poisoned(PublishCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any):
            with torch.no_grad():
                model.model.norm.weight.fill_(float("nan"))
            super().on_step_end(args, state, control, model=model)

    with pytest.raises(PoisonError, match=r"norm\.weight"):
        train(model(), Poisoned(Publisher(open_store("memory://"), RUN)), tmp_path)


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_publishes(main: bool) -> None:
    store: Store = open_store("memory://")
    callback = PublishCallback(Publisher(store, RUN))
    callback.on_train_end(
        None, TrainerState(global_step=3, is_world_process_zero=main), None, model=model()
    )
    assert (Archive(store, RUN).newest() is not None) == main


def test_a_model_with_adapters_is_refused_before_the_first_step(tmp_path: Path) -> None:
    module = model()
    layer = module.model.layers[0].self_attn
    layer.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(2)))
    callback = PublishCallback(Publisher(open_store("memory://"), RUN))
    with pytest.raises(ConfigError, match="adapters"):
        train(module, callback, tmp_path)


def test_what_is_served_may_be_said(tmp_path: Path) -> None:
    store = open_store("memory://")

    def norms(module: Any) -> dict[str, Any]:
        return {n: t for n, t in served_tensors(module).items() if "norm" in n}

    train(model(), PublishCallback(Publisher(store, RUN), tensors=norms), tmp_path, steps=1)
    assert set(Archive(store, RUN).rebuild(1)) == set(norms(model()))


def test_every_must_be_a_count() -> None:
    with pytest.raises(ConfigError, match="every is 0"):
        PublishCallback(Publisher(open_store("memory://"), RUN), every=0)
