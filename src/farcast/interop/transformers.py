"""Far-away replicas for any script that trains with `transformers.Trainer`.

    publisher = Publisher(open_store("s3://bucket/run1"), "run1")
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PublishCallback(publisher)])
    trainer.train()

Version 0 is published before the first step, then one after each optimizer step, in the
background. What is served are the model's floating point parameters in bf16, and its persistent
buffers as they are, under the names of its checkpoint.

Refuses models whose whole tensors no single process holds, unless the publisher has `comms`; and
models with adapters, since what a replica should serve of them is the caller's to say (`tensors`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from farcast.errors import ConfigError
from farcast.formats import canonical_names, served_bf16
from farcast.interop.overlapping import Overlapped
from farcast.publish import Publisher

TensorsOf = Callable[[Any], Mapping[str, Any]]


class PublishCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Publishes after every `every`th optimizer step and after the last.

    Every process of a distributed run makes one. Where each holds the whole model (one process,
    DDP) only the main one publishes; with sharded parameters all do, and the publisher needs
    `comms=TorchComms()`. `tensors` says what is served of a model, if not `served_tensors`.
    """

    def __init__(
        self, publisher: Publisher, *, every: int = 1, tensors: TensorsOf | None = None
    ) -> None:
        if every < 1:
            raise ConfigError(f"every is {every}; publish after every 1st, 2nd, ... step.")
        self._publisher = publisher
        self._overlapped = Overlapped(publisher)
        self._every = every
        self._tensors = tensors or served_tensors
        self._checked = tensors is not None

    @property
    def failures(self) -> int:
        """Versions that did not reach the store; a later one carried what they held."""
        return self._overlapped.failures

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Replicas can start, and a model that cannot be published is refused before a step."""
        del args, control
        if self._publishes(state, model):
            self._overlapped.publish(self._tensors(model), state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """The optimizer has stepped."""
        del args, control
        if state.global_step % self._every == 0 and self._publishes(state, model):
            self._overlapped.publish(self._tensors(model), state.global_step)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Durable when training returns."""
        del args, control
        if self._publishes(state, model):
            self._overlapped.finish(self._tensors(model), state.global_step)

    def _publishes(self, state: Any, model: Any) -> bool:
        sharded = self._publisher.is_sharded
        if not self._checked:
            check_model(model, sharded=sharded)
            self._checked = True
        return sharded or bool(state.is_world_process_zero)


def served_tensors(module: Any) -> dict[str, Any]:
    """What a replica serves of a module, by the names in its checkpoint; tied weights once."""
    names = canonical_names([name for name, _ in module.named_parameters()])
    served = {
        names[name]: served_bf16(param) if param.is_floating_point() else param.detach()
        for name, param in module.named_parameters()
    }
    kept = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in kept}
    renamed = canonical_names(buffers)
    return served | {renamed[name]: buffer.detach() for name, buffer in buffers.items()}


def check_model(module: Any, *, sharded: bool = False) -> None:
    """Whether `served_tensors` gives what a replica could load."""
    for name, param in module.named_parameters():
        if ".base_layer." in name or "lora_" in name:
            raise ConfigError(
                f"The model has adapters ({name[:80]}); give PublishCallback `tensors`, a function "
                "that returns the merged weights, or the adapters alone, of a model."
            )
        if hasattr(param, "ds_id"):
            raise ConfigError(
                "DeepSpeed ZeRO-3 holds only parts of the parameters; shard with FSDP2, or give "
                "PublishCallback `tensors`, a function that gathers them on the main process."
            )
        if not sharded and isinstance(param, DTensor):
            raise ConfigError(
                "The parameters are sharded over ranks; make the publisher with "
                "comms=TorchComms() on every rank."
            )
