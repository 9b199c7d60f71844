"""The demo's ready-made runs: a model with a task on which it visibly learns.

Learning rates and group sizes stand here and nowhere else. A preset is a starting point, not a
limit: `farcast train --config` takes any `RunConfig`.
"""

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from farcast.config import (
    ObjectiveName,
    OptimizerName,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
)
from farcast.errors import ConfigError


class Preset(NamedTuple):
    title: str
    task: TaskConfig
    sampling: SamplingConfig
    train: TrainConfig


PRESETS = {
    "smollm2": Preset(
        title="SmolLM2-135M-Instruct",
        # One-digit products: the model knows some (0.3 right at temperature 1), and within a group
        # answers differ, so there is something to learn from the first step.
        task=TaskConfig(
            name="reasoning_gym/products",
            params={"min_digits": 1, "max_digits": 1},
            system="Give only the answer.",
            answer_prefix="Answer:",
            extract="last_integer",
        ),
        sampling=SamplingConfig(max_new_tokens=8, batch_groups=4),
        train=TrainConfig(
            steps=24,
            learning_rate=5e-6,
            group_size=8,
            groups_per_step=8,
            max_staleness=4,
            clip_low=0.2,
            clip_high=0.28,
            checkpoint_every=10,
            anchor_every=20,
            max_backlog_groups=8,
        ),
    ),
    "tiny": Preset(
        title="a built model of about 1 M parameters",
        task=TaskConfig(name="letters"),
        sampling=SamplingConfig(max_new_tokens=12, batch_groups=4),
        train=TrainConfig(
            steps=8,
            learning_rate=3e-3,
            group_size=8,
            groups_per_step=8,
            checkpoint_every=2,
            anchor_every=4,
        ),
    ),
}
DEFAULT_MODEL = "smollm2"


def check_model(model: str) -> None:
    """A model is a preset's name or a local folder; say so before anything is written."""
    if model in PRESETS:
        return
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"There is no model {model!r}; name one of {', '.join(sorted(PRESETS))}, "
            "or a local Hugging Face folder."
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"The folder {model} holds no config.json; name a Hugging Face model folder."
        )


def run_config(
    model: str,
    *,
    run_id: str,
    store: str,
    out: Path,
    steps: int | None = None,
    seed: int = 0,
    objective: ObjectiveName | None = None,
    optimizer: OptimizerName | None = None,
    signing_key: Path | None = None,
) -> RunConfig:
    """A run of a preset, or of a local model folder with the settings of the real preset."""
    check_model(model)
    preset = PRESETS.get(model, PRESETS[DEFAULT_MODEL])
    asked = {"steps": steps, "objective": objective, "optimizer": optimizer}
    train = replace(
        preset.train,
        seed=seed,
        answer_tokens=preset.sampling.max_new_tokens,
        **{key: value for key, value in asked.items() if value is not None},
    )
    return RunConfig(
        run_id=run_id,
        store=store,
        model=model,
        out=str(out),
        task=preset.task,
        sampling=preset.sampling,
        train=train,
        signing_key=None if signing_key is None else str(signing_key.expanduser().absolute()),
    )
