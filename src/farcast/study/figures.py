"""The figures, each from settings and recorded runs to rows. Nothing is drawn here.

law         changed weights against mean min(1, |step| / cell), step by step, AdamW and Muon
where       the same by kind of tensor, by layer and by exponent
optimizers  AdamW, Muon of both scales and SGD over learning rates, in bf16
formats     every served format over learning rates
scales      scale policies, step by step: what moves when a scale moves
lag         a version against one k before it: one delta, the deltas between, an anchor
stages      on-policy and late GRPO, fine-tuning, continued pretraining, pretraining
sticky      thresholds of sticky rounding along the run, and what they cost (see `costs`)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from farcast.errors import ConfigError
from farcast.study.cells import Tensors
from farcast.study.costs import sticky_costs
from farcast.study.directions import OptimizerKind, kind_of, layer_of
from farcast.study.measuring import (
    Law,
    Line,
    Served,
    by_exponent,
    counts_of,
    delta_bytes,
    full_bytes,
)
from farcast.study.replay import Hop, replay
from farcast.study.rows import Row
from farcast.study.settings import STAGES
from farcast.study.setup import Setup, Tag

LAW_RATES = (1e-6, 3e-6)
FORMAT_NAMES = (
    "bf16",
    "fp16",
    "fp8_block",
    "fp8_block_pow2",
    "fp8_channel",
    "int8",
    "int4_g32",
    "int4_g128",
    "nvfp4",
    "mxfp4",
)
STAGE_FORMATS = ("bf16", "fp8_block_pow2", "int4_g32", "mxfp4")
LAG_FORMATS = ("bf16", "fp8_block_pow2", "mxfp4")
SCALE_RECIPES = (
    "fp8_block",
    "fp8_block_pow2",
    "fp8_block-scale1.05",
    "fp8_channel",
    "fp8_channel_pow2",
    "fp8_channel-scale1.05",
    "int8",
    "int8_pow2",
    "int8-scale1.05",
    "int4_g32",
    "int4_g32-scale1.05",
    "nvfp4",
    "nvfp4-scale1.25",
    "mxfp4",
)
STICKY_RECIPES = (
    "bf16",
    "bf16-round0.6",
    "bf16-round0.75",
    "bf16-round1",
    "fp8_block_pow2",
    "fp8_block_pow2-round0.75",
    "mxfp4",
    "mxfp4-round0.75",
)
LAGS = (1, 2, 4, 8, 16, 32, 64)


def _moved_row(tag: Tag, hop: Hop, line: Line, old: Served, **more: Any) -> Row:
    """What a hop did to the served tensors of a recipe."""
    counts, law = counts_of(old, line.served, line.recipe), Law(old, line.recipe)
    return tag.row(
        hop.step,
        line.recipe.name,
        weights=counts.weights,
        changed_fraction=counts.fraction,
        predicted_fraction=law.fraction(hop.told),
        actual_fraction=law.fraction(hop.moved),
        scales_changed=counts.scale_fraction,
        bytes=delta_bytes(old, line.served),
        bytes_full=full_bytes(line.served),
        **more,
    )


def _hop_row(tag: Tag, hop: Hop, recipe: str, **more: Any) -> Row:
    """The same for a recipe without a past."""
    line = Line(recipe, hop.base)
    return _moved_row(tag, hop, line, line.advance(hop.target), **more)


def law(setup: Setup) -> Iterator[Row]:
    """Every step of the law's two rates, and of masters fresh from a checkpoint."""
    settings, stream = setup.settings, setup.stream("grpo")
    cases: list[tuple[OptimizerKind, bool]] = [("adamw", False), ("muon", False), ("adamw", True)]
    for kind, fresh in cases:
        names = stream.hidden
        steps = replay(
            stream, kind, setup.run.train, steps=settings.law_steps, names=names, fresh=fresh
        )
        for moment in steps:
            setup.progress(f"law: {kind}, step {moment.step}", moment.step, settings.law_steps)
            for lr in LAW_RATES:
                tag = Tag("law", settings.model, "grpo", kind, lr)
                hop = moment.masters(lr, kind, names)
                yield _hop_row(tag, hop, "bf16", masters="fresh" if fresh else "spread")


def where(setup: Setup) -> Iterator[Row]:
    """The last of the law's steps, AdamW at its first rate, by parts of the model."""
    settings, stream = setup.settings, setup.stream("grpo")
    tag = Tag("where", settings.model, "grpo", "adamw", LAW_RATES[0])
    for moment in replay(stream, "adamw", setup.run.train, steps=settings.law_steps):
        setup.progress(f"where: step {moment.step}", moment.step, settings.law_steps)
    hop = moment.masters(tag.lr, "adamw", stream.hidden)
    parts: dict[str, set[str]] = {}
    for name, tensor in hop.base.items():
        parts.setdefault(f"kind={kind_of(name, tensor)}", set()).add(name)
        layer = layer_of(name)
        if layer is not None:
            parts.setdefault(f"layer={layer}", set()).add(name)
    for part, names in parts.items():
        yield _hop_row(tag, _cut(hop, names), "bf16", group=part)
    line = Line("bf16", hop.base)
    old = line.advance(hop.target)
    for found in by_exponent(old, line.served, hop.told or hop.moved, hop.moved):
        yield tag.row(
            hop.step,
            "bf16",
            group=f"exponent={found.exponent}",
            weights=found.weights,
            changed_fraction=found.changed / found.weights,
            predicted_fraction=found.told / found.weights,
            actual_fraction=found.actual / found.weights,
        )


def _cut(hop: Hop, names: set[str]) -> Hop:
    def cut(tensors: Tensors) -> dict[str, Any]:
        return {name: tensor for name, tensor in tensors.items() if name in names}

    told = None if hop.told is None else cut(hop.told)
    return Hop(hop.step, cut(hop.base), cut(hop.target), cut(hop.moved), told)


def optimizers(setup: Setup) -> Iterator[Row]:
    """The matrices of the followed layers, at the last of the law's steps."""
    settings, stream = setup.settings, setup.stream("grpo")
    kinds: tuple[tuple[OptimizerKind, ...], ...] = (("adamw",), ("muon", "muon_unscaled"), ("sgd",))
    for together in kinds:
        steps = settings.law_steps
        for moment in replay(
            stream, together[0], setup.run.train, steps=steps, names=stream.hidden
        ):
            setup.progress(f"optimizers: {together[0]}, step {moment.step}", moment.step, steps)
        for kind in together:
            for lr in settings.rates:
                tag = Tag("optimizers", settings.model, "grpo", kind, lr)
                yield _hop_row(tag, moment.masters(lr, kind, stream.hidden), "bf16")


def formats(setup: Setup) -> Iterator[Row]:
    """The same matrices in every format, with AdamW; the newest version as an anchor, too."""
    settings, stream = setup.settings, setup.stream("grpo")
    steps = settings.law_steps
    for moment in replay(stream, "adamw", setup.run.train, steps=steps, names=stream.hidden):
        setup.progress(f"formats: step {moment.step}", moment.step, steps)
    for lr in settings.format_rates:
        hop = moment.masters(lr, "adamw", stream.hidden)
        tag = Tag("formats", settings.model, "grpo", "adamw", lr)
        for number, recipe in enumerate(FORMAT_NAMES):
            setup.progress(f"formats: {recipe}, rate {lr:g}", number, len(FORMAT_NAMES))
            line = Line(recipe, hop.base)
            old = line.advance(hop.target)
            anchor = delta_bytes({}, line.served)
            yield _moved_row(tag, hop, line, old, bytes_anchor=anchor)


def scales(setup: Setup) -> Iterator[Row]:
    """Scale policies over the law's steps, each version following from the one before."""
    yield from _lines(setup, "scales", SCALE_RECIPES, setup.settings.law_steps)


def sticky(setup: Setup) -> Iterator[Row]:
    """Thresholds along the whole run, and what they cost."""
    yield from _lines(setup, "sticky", STICKY_RECIPES, setup.settings.steps)
    yield from sticky_costs(setup)


def _lines(setup: Setup, figure: str, recipes: tuple[str, ...], steps: int) -> Iterator[Row]:
    settings, stream = setup.settings, setup.stream("grpo")
    tag = Tag(figure, settings.model, "grpo", "adamw", STAGES["grpo"].lr)
    lines: list[Line] = []
    for moment in replay(stream, "adamw", setup.run.train, steps=steps, names=stream.hidden):
        setup.progress(f"{figure}: step {moment.step}", moment.step, steps)
        hop = moment.masters(tag.lr, "adamw", stream.hidden)
        lines = lines or [Line(recipe, hop.base) for recipe in recipes]
        for line in lines:
            old = line.advance(hop.target)
            yield _moved_row(tag, hop, line, old)


def lag(setup: Setup) -> Iterator[Row]:
    """The run's last version against those k before it."""
    settings, stream = setup.settings, setup.stream("grpo")
    steps = settings.steps
    for lr in LAW_RATES:
        tag = Tag("lag", settings.model, "grpo", "adamw", lr)
        lines: list[Line] = []
        held: dict[tuple[str, int], Served] = {}
        sizes: dict[str, list[int]] = {recipe: [] for recipe in LAG_FORMATS}
        wanted = {steps - k: k for k in LAGS if k <= min(settings.largest_lag, steps - 1)}
        for moment in replay(stream, "adamw", setup.run.train, steps=steps, names=stream.hidden):
            setup.progress(f"lag: rate {lr:g}, step {moment.step}", moment.step, steps)
            hop = moment.masters(lr, "adamw", stream.hidden)
            lines = lines or [Line(recipe, hop.base) for recipe in LAG_FORMATS]
            for line in lines:
                old = line.advance(hop.target)
                sizes[line.recipe.name].append(delta_bytes(old, line.served))
                if moment.step in wanted:
                    held[line.recipe.name, wanted[moment.step]] = line.served
        for line in lines:
            yield from _lag_rows(tag, steps, line, held, sizes[line.recipe.name])


def _lag_rows(
    tag: Tag, step: int, line: Line, held: dict[tuple[str, int], Served], sizes: list[int]
) -> Iterator[Row]:
    anchor = delta_bytes({}, line.served)
    for (recipe, k), old in sorted(held.items()):
        if recipe == line.recipe.name:
            counts = counts_of(old, line.served, line.recipe)
            yield tag.row(
                step,
                recipe,
                lag=k,
                weights=counts.weights,
                changed_fraction=counts.fraction,
                scales_changed=counts.scale_fraction,
                bytes=delta_bytes(old, line.served),
                bytes_full=full_bytes(line.served),
                bytes_anchor=anchor,
                bytes_chain=sum(sizes[-k:]),
            )


def stages(setup: Setup) -> Iterator[Row]:
    """Each stage's own run: its last steps in four formats, and all its tensors in bf16."""
    settings = setup.settings
    for stage, spec in STAGES.items():
        stream = setup.stream(stage)
        yield from stream.record.rows
        last = settings.stage_steps
        tag = Tag("stages", settings.model, stage, "adamw", spec.lr)
        for moment in replay(stream, "adamw", setup.run.train, steps=last, names=stream.hidden):
            setup.progress(f"stages: {spec.title}, step {moment.step}", moment.step, last)
            if moment.step > max(last - 4, 0):
                hop = moment.masters(spec.lr, "adamw", stream.hidden)
                for recipe in STAGE_FORMATS:
                    line = Line(recipe, hop.base)
                    old = line.advance(hop.target)
                    anchor = delta_bytes({}, line.served) if moment.step == last else None
                    yield _moved_row(tag, hop, line, old, bytes_anchor=anchor)


FIGURES: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "law": law,
    "where": where,
    "optimizers": optimizers,
    "formats": formats,
    "scales": scales,
    "lag": lag,
    "stages": stages,
    "sticky": sticky,
}


def known_figures(names: Sequence[str] | None) -> tuple[str, ...]:
    """Those of `names`, in the order of all; all for none. Raises `ConfigError` for a name that is
    none of them."""
    unknown = next((name for name in names or () if name not in FIGURES), None)
    if unknown is not None:
        raise ConfigError(f"There is no figure {unknown[:40]!r}; name {', '.join(FIGURES)}.")
    return tuple(name for name in FIGURES if not names or name in names)
