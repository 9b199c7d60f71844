"""Recorded gradients of a run: made once, followed by every optimizer, rate and format.

    stream.json             settings, and what the run itself did (written last)
    start.safetensors       the followed masters before the first step, fp32
    step-0001.safetensors   their gradients, clipped as the trainer clips, fp32; without those of
                            tensors that had none, as where all answers earn the same

Followed are the tensors of some layers, and rows of the embedding: the model's whole gradients
would fill a disk. Of the run itself, which trains every tensor, all are compared now and then.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from farcast.config import RunConfig
from farcast.delta import all_bits, encode_bits
from farcast.study.cells import chance, widths
from farcast.study.directions import adamw_direction, kind_of, layer_of, rates, sorted_layers
from farcast.study.folder import check_folder, clear_folder
from farcast.study.rows import Row
from farcast.study.settings import STAGES, StageName, StudySettings
from farcast.study.stages import Tapped, make_course, make_policy
from farcast.train.optimizers import hidden_matrices
from farcast.train.policy import Policy

Tensors = dict[str, torch.Tensor]
Progress = Callable[[str, int, int], None]

_STREAM, _START = "stream.json", "start.safetensors"
_OWN = re.compile(r"stream\.json(\.part)?|start\.safetensors|step-\d{4,}\.safetensors")


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What stream.json holds."""

    stage: StageName
    settings: StudySettings
    """Its `stream_key`."""
    steps: int
    hidden: tuple[str, ...]
    """The followed matrices that Muon is for."""
    parameters: int
    """Of the whole model."""
    followed: int
    gains: tuple[float, ...]
    """Mean reward of each step's samples, or the negative loss."""
    rows: tuple[Row, ...]


class Followed(NamedTuple):
    """Names of the followed tensors, and how many rows of each from the first; None for all."""

    rows: Mapping[str, int | None]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], settings: StudySettings) -> "Followed":
        """Layers spread over the depth, the first and the last among them."""
        layers = sorted_layers(tensors)
        count = min(settings.layers, len(layers))
        chosen = {layers[i * (len(layers) - 1) // max(count - 1, 1)] for i in range(count)}
        rows: dict[str, int | None] = {}
        for name, tensor in tensors.items():
            if kind_of(name, tensor) == "embedding":
                rows[name] = settings.embedding_rows
            elif layer_of(name) is None or layer_of(name) in chosen:
                rows[name] = None
        return cls(rows)

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.rows[name] is None else tensor[: self.rows[name]]


class Stream:
    """A recorded run in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.record = msgspec.json.decode((folder / _STREAM).read_bytes(), type=StreamRecord)

    @property
    def hidden(self) -> frozenset[str]:
        return frozenset(self.record.hidden)

    def start(self) -> Tensors:
        """Masters before the first step."""
        return _load(self._folder / _START)

    def gradients(self, steps: int) -> Iterator[Tensors]:
        """Of the first `steps` steps, in order."""
        for step in range(1, min(steps, self.record.steps) + 1):
            yield _load(_step_file(self._folder, step))


def open_stream(
    stage: StageName,
    folder: Path,
    model: Path,
    run: RunConfig,
    settings: StudySettings,
    progress: Progress,
) -> Stream:
    """The stream in `folder`, recorded now unless it is there with these settings."""
    check_folder(folder)
    try:
        held = Stream(folder)
        if (held.record.settings, held.record.stage) == (settings.stream_key(stage), stage):
            return held
    except (OSError, msgspec.DecodeError):
        pass  # not there, or of another version: it is made anew
    clear_folder(folder, _OWN)
    record = _Recorder(stage, folder, model, run, settings).run(progress)
    part = folder / f"{_STREAM}.part"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    part.replace(folder / _STREAM)
    return Stream(folder)


class _Recorder:
    """Trains by the stage, and writes down what it needed."""

    def __init__(
        self, stage: StageName, folder: Path, model: Path, run: RunConfig, settings: StudySettings
    ) -> None:
        from msgspec.structs import replace

        self._stage, self._folder, self._settings = stage, folder, settings
        self._spec = STAGES[stage]
        train = replace(run.train, learning_rate=self._spec.lr, warmup_steps=settings.warmup)
        self._run = replace(run, train=train)
        self._policy = make_policy(
            model, self._run, from_scratch=self._spec.from_scratch, seed=settings.seed
        )
        self._course = make_course(stage, self._policy, model, self._run, settings)
        self._named = dict(self._policy.module.named_parameters())
        self._followed = Followed.of(self._named, settings)
        self._step = 0

    def run(self, progress: Progress) -> StreamRecord:
        settings = self._settings
        steps = settings.steps if self._stage == "grpo" else settings.stage_steps
        state = self._policy.state()
        start = {n: state[f"master/{n}"] for n in self._followed.rows}
        _save(self._cut(start), self._folder / _START)
        learner = Tapped(self._policy, self._take)
        gains, rows = [], []
        for step in range(1, steps + 1):
            progress(f"{self._spec.title}: step {step}", step - 1, steps)
            self._step = step
            watched = step % settings.full_every == 0 or step == steps
            look = Look(self._policy, self._run, step) if watched else None
            gains.append(self._course.step(step, learner))
            if look is not None:
                rows.append(look.row(self._stage, settings.model))
        hidden = hidden_matrices(self._policy.module)
        return StreamRecord(
            stage=self._stage,
            settings=settings.stream_key(self._stage),
            steps=steps,
            hidden=tuple(sorted(hidden & self._followed.rows.keys())),
            parameters=sum(p.numel() for p in self._named.values()),
            followed=sum(t.numel() for t in self._cut(start).values()),
            gains=tuple(gains),
            rows=tuple(rows),
        )

    def _cut(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        return {name: self._followed.cut(name, tensors[name]) for name in self._followed.rows}

    def _take(self) -> None:
        """Write the gradients of the step that is about to be made."""
        grads = {n: p.grad for n, p in self._named.items() if p.grad is not None}
        norms = [grad.norm() for grad in grads.values()]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        factor = min(1.0, self._run.train.grad_clip / (norm + 1e-6))
        kept = {
            name: self._followed.cut(name, grads[name] * factor)
            for name in self._followed.rows
            if name in grads
        }
        _save(kept, _step_file(self._folder, self._step))


class Look:
    """Compares all tensors of a run before and after its AdamW's step `step`."""

    def __init__(self, policy: Policy, run: RunConfig, step: int) -> None:
        self._policy, self._run, self._step = policy, run, step
        self._before = policy.served()
        self._count = self._counted()
        self._predicted = self._fraction() if self._count else None

    def row(self, stage: StageName, model: str) -> Row:
        """What the step did."""
        train = self._run.train
        served = self._policy.served()
        encoded = encode_bits(all_bits(self._before), all_bits(served))
        return Row(
            figure="stream",
            model=model,
            stage=stage,
            loop="closed",
            optimizer="adamw",
            lr=train.learning_rate,
            format="bf16",
            step=self._step,
            weights=encoded.elements,
            changed_fraction=encoded.changed / encoded.elements,
            predicted_fraction=self._predicted,
            actual_fraction=self._fraction() if self._counted() > self._count else 0.0,
            bytes=len(encoded.data),
            bytes_full=sum(t.numel() * t.element_size() for t in served.values()),
        )

    def _counted(self) -> int:
        """Steps that the optimizer made: it makes none without gradients."""
        found = [v for key, v in self._policy.state().items() if key.startswith("step/")]
        return max((int(value) for value in found), default=0)

    def _fraction(self) -> float:
        """By the moments as they are, at the rate of this step."""
        train, state = self._run.train, self._policy.state()
        rate = rates(train.learning_rate, train.warmup_steps, self._step)
        total, count = 0.0, 0
        with torch.no_grad():
            for name, old in self._before.items():
                first = state.get(f"exp_avg/{name}")
                if first is None:
                    continue
                second, steps = state[f"exp_avg_sq/{name}"], int(state[f"step/{name}"])
                moved = adamw_direction(first, second, steps, (train.beta1, train.beta2)) * rate
                total += float(chance(moved, widths("bf16", old.float())).sum(dtype=torch.float64))
                count += old.numel()
        return total / max(count, 1)


def _step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:04d}.safetensors"


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: t.detach().float().contiguous() for name, t in tensors.items()}, path)


def _load(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(path)
    return found
