"""What a study measures, as frozen data: figures made under equal settings are not made again."""

from typing import Literal

import msgspec

StageName = Literal["grpo", "grpo_async", "sft", "continued", "pretraining"]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train: its usual rate, and how it begins. AdamW, with linear warm-up."""

    title: str
    lr: float
    lag: int = 0
    """Steps between sampling and learning, for the stages that sample."""
    from_scratch: bool = False
    """Begin with random weights instead of the model's."""


STAGES: dict[StageName, Stage] = {
    "grpo": Stage(title="GRPO, on-policy", lr=1e-6),
    "grpo_async": Stage(title="GRPO, samples 4 versions old", lr=1e-6, lag=4),
    "sft": Stage(title="supervised fine-tuning", lr=1e-5),
    "continued": Stage(title="continued pretraining", lr=3e-5),
    "pretraining": Stage(title="pretraining from scratch", lr=1e-3, from_scratch=True),
}


class StudySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` are those of the GRPO run, which most figures follow; `stage_steps` of the others."""

    model: str
    seed: int = 0
    steps: int = 80
    stage_steps: int = 16
    warmup: int = 8
    groups: int = 1
    """Prompts of a GRPO step; answers are redrawn until rewards differ within each."""
    members: int = 8
    sequences: int = 2
    """Of a step of the other stages."""
    length: int = 128
    """Tokens of a sequence of text."""
    layers: int = 4
    """Layers whose tensors are followed, spread over the model's depth."""
    embedding_rows: int = 6144
    law_steps: int = 24
    """Steps of the figures that compare optimizers: Muon's are dear."""
    rates: tuple[float, ...] = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    format_rates: tuple[float, ...] = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
    full_every: int = 8
    """Every so many steps all tensors of the model are compared, not only the followed ones."""
    largest_lag: int = 64
    answers: int = 64
    """Answers that KL and reward are means over."""
    cost_steps: int = 40
    """Steps of the run that sticky rounding is judged by."""

    def stream_key(self, stage: StageName) -> "StudySettings":
        """These settings with everything at its default that the stage's gradients don't follow
        from."""
        defaults = StudySettings(model=self.model)
        steps = self.steps if stage == "grpo" else self.stage_steps
        return msgspec.structs.replace(
            self,
            steps=steps,
            stage_steps=steps,
            law_steps=defaults.law_steps,
            rates=defaults.rates,
            format_rates=defaults.format_rates,
            largest_lag=defaults.largest_lag,
            answers=defaults.answers,
            cost_steps=defaults.cost_steps,
        )


QUICK = StudySettings(
    model="tiny",
    steps=72,
    stage_steps=10,
    groups=2,
    law_steps=20,
    rates=(1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3),
    format_rates=(1e-6, 1e-5, 1e-4),
)
FULL = StudySettings(model="smollm2")


def settings_for(model: str, *, quick: bool, seed: int = 0) -> StudySettings:
    """Of a whole study of the model, or of a quick one."""
    return msgspec.structs.replace(QUICK if quick else FULL, model=model, seed=seed)
