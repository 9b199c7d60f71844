"""TRL's AsyncGRPOTrainer, with a replica that is reached through an object store only.

    pip install farcast[trl]
    python examples/trl_async_grpo.py            # two minutes on one core, no network
    python examples/trl_async_grpo.py --folder runs/trl    # killed and started again, it goes on

The trainer publishes a version after each optimizer step. A replica follows and samples the
`letters` task; here it is a thread, elsewhere it is a process on another continent that shares
nothing with the trainer but the store's address. The model has a million random parameters.
"""

import argparse
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

from farcast import Publisher, Subscriber, TrajectorySender, open_store
from farcast.config import SamplingConfig, TaskConfig
from farcast.engines.chat import ChatCodec
from farcast.engines.modules import empty_module
from farcast.engines.transformers_engine import TransformersEngine
from farcast.interop.trl import FarcastRollouts, FarcastTransfer
from farcast.interop.trl_resume import RolloutsInCheckpoint, newest_checkpoint
from farcast.replica.widened import WidenedModule
from farcast.rollout import Worker, make_environment
from farcast.store.base import Store
from farcast.train.models import TINY, default_cache, prepare_model

RUN = "trl"
GROUP_SIZE = 8
MAX_STALENESS = 4
TASK = TaskConfig(name="letters")
SAMPLING = SamplingConfig(max_new_tokens=12, batch_groups=4)


def main(folder: Path, *, steps: int, model: Path | None = None) -> list[float]:
    """Train, or go on; returns the mean reward that TRL logged for each step."""
    model = model or prepare_model(TINY, default_cache())
    store = open_store(folder / "store")
    transfer = FarcastTransfer(Publisher(store, RUN))
    rollouts = FarcastRollouts(store, RUN, transfer, max_staleness=MAX_STALENESS)
    allow_cpu()
    trainer = AsyncGRPOTrainer(
        model=str(model),
        args=arguments(folder, steps),
        # Questions and rewards are the worker's; TRL wants a dataset all the same.
        train_dataset=Dataset.from_dict({"prompt": ["-"] * 1024}),
        weight_transfer=transfer,
        rollout_worker=rollouts,
        callbacks=[RolloutsInCheckpoint(rollouts)],
    )
    stop = threading.Event()
    replica = threading.Thread(target=sample, args=(store, model, rollouts, stop))
    replica.start()
    try:
        trainer.train(resume_from_checkpoint=newest_checkpoint(folder / "trl"))
    finally:
        stop.set()
        replica.join()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def arguments(folder: Path, steps: int) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=4 * GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=SAMPLING.max_new_tokens,
        max_staleness=MAX_STALENESS,
        learning_rate=3e-3,
        token_budget=2048,
        dtype="float32",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )


def sample(store: Store, model: Path, rollouts: FarcastRollouts, stop: threading.Event) -> None:
    """A replica with its worker, as `farcast worker` runs one."""
    codec = ChatCodec.from_folder(model, TASK)
    target = WidenedModule(empty_module(model))
    engine = TransformersEngine(
        target.module, Subscriber(store, RUN, target), eos_ids=codec.eos_ids, pad_id=codec.pad_id
    )
    sender = TrajectorySender(
        store, RUN, "r1", max_backlog_groups=4, position_of_reader=lambda: rollouts.position("r1")
    )
    worker = Worker(
        engine,
        make_environment(TASK),
        codec,
        sender,
        group_size=GROUP_SIZE,
        task=TASK,
        sampling=SAMPLING,
        stop=stop.is_set,
    )
    engine.start()
    try:
        worker.run()
    finally:
        engine.close()


def allow_cpu() -> None:
    """TRL 1.16 calls a CUDA kernel for attention and asks a GPU for its speed. Without a GPU, do
    both another way; with one, change nothing."""
    if torch.cuda.is_available():
        return
    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    packing._flash_attn = lambda: kernel
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders_q: torch.Tensor,
    borders_k: torch.Tensor,
    *_: Any,
    softmax_scale: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """Causal attention of segments of queries to their own keys, both aligned at the end."""
    outputs = []
    for i in range(len(borders_q) - 1):
        q = query[borders_q[i] : borders_q[i + 1]].transpose(0, 1)
        k = key[borders_k[i] : borders_k[i + 1]].transpose(0, 1)
        v = value[borders_k[i] : borders_k[i + 1]].transpose(0, 1)
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        seen = seen.tril(k.shape[1] - q.shape[1])
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], seen, scale=softmax_scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="keep the run here [default: a scratch folder]")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farcast-trl-") as scratch:
        rewards = main(wanted.folder or Path(scratch), steps=wanted.steps)
        for number, reward in enumerate(rewards, 1):
            print(f"step {number}: mean reward {reward:.3f}")
