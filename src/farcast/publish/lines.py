"""The served formats of one run, side by side.

A line is one format: its recipe, its baseline, its way back. All lines take the same number, and
one manifest commits them, so no replica sees a version in one format before another can see it in
the next. A format that the newest version was not served in begins with a full copy.

Sticky recipes continue from the baseline, which is what the store holds: a publisher that was
started again derives the same bytes as one that went on.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as altered
from typing import Any

import msgspec

from farcast.delta import AnyBits, from_bits, held_bits, to_bits
from farcast.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    TensorMismatchError,
    UnknownVersionError,
)
from farcast.formats import Recipe, canonical_names, parse_recipe
from farcast.lineage import Manifest, joined
from farcast.publish.drafting import Base, Draft, Drafting, draft_version
from farcast.publish.history import History
from farcast.publish.snapshot import Bits
from farcast.store.archive import Archive
from farcast.store.rebuilding import Weights

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One served format. Without a recipe the trainer hands over what is served."""

    how: Drafting
    recipe: Recipe | None
    reader: Archive
    history: History

    def view(self, manifest: Manifest) -> Manifest | None:
        """A version as this line has it; None where it was not served in this format."""
        if self.recipe is None:
            return manifest
        name = self.recipe.name
        return manifest.view(name) if name in manifest.served_formats else None

    def root_in(self, manifest: Manifest) -> str:
        """This line's root in a version; "" where it has none."""
        view = self.view(manifest)
        return "" if view is None else view.root


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest version as the store has it (None in an empty store), and each line's bits."""

    manifest: Manifest | None
    bases: tuple[Base, ...]


def make_lines(how: Drafting, recipes: Sequence[Recipe]) -> tuple[Line, ...]:
    """A line for each recipe; without any, one for what is handed over."""
    if not recipes:
        return (Line(how=how, recipe=None, reader=how.archive, history=History()),)
    return tuple(_line(how, recipe) for recipe in recipes)


def _line(how: Drafting, recipe: Recipe) -> Line:
    rule = recipe.rule if recipe.layout.quantised else msgspec.UNSET
    whole = how.archive
    reader = Archive(
        whole.store,
        whole.run_id,
        trusted=whole.trusted,
        served_format=recipe.name,
        threads=how.threads,
    )
    how = altered(how, served_format=recipe.name, precision_rule=rule)
    return Line(how=how, recipe=recipe, reader=reader, history=History())


def parse_recipes(formats: Sequence[str], *, served_format: str) -> tuple[Recipe, ...]:
    """The recipes of the names, none of them twice. Raises `ConfigError`."""
    if isinstance(formats, str):
        raise ConfigError(f"formats is a list of names; write [{formats!r}].")
    recipes = tuple(map(parse_recipe, formats))
    if len(set(recipes)) != len(recipes):
        raise ConfigError("A served format is named twice; name each once.")
    if recipes and served_format not in ("bf16", recipes[0].name):
        raise ConfigError("served_format names what is handed over; formats what is made of it.")
    return recipes


# --- what the store holds --------------------------------------------------------------------


def load_newest(lines: Sequence[Line], before: Sequence[Base] | None, *, reanchor: bool) -> Newest:
    """The newest version with its bits in every format; `before` are bases to start from."""
    newest = lines[0].how.archive.newest()
    have = [None] * len(lines) if before is None else [base.weights for base in before]
    bases = tuple(
        _load(line, newest, weights, reanchor=reanchor)
        for line, weights in zip(lines, have, strict=True)
    )
    return Newest(manifest=newest, bases=bases)


def _load(line: Line, newest: Manifest | None, have: Weights | None, *, reanchor: bool) -> Base:
    if newest is None:
        return Base(newest=None, weights=None)
    view = line.view(newest)
    if view is None:
        return Base(newest=newest, weights=None)
    try:
        return Base(newest=view, weights=line.reader.restore(newest.version, have))
    except (IntegrityError, FormatError, ObjectNotFoundError, UnknownVersionError) as error:
        if reanchor:
            _LOG.warning("%s can't be rebuilt; the next is published in full.", view.ref)
            return Base(newest=newest, weights=None)
        error.add_note(
            f"The newest version {view.ref} can't be rebuilt; "
            "reanchor=True goes on with a full copy."
        )
        raise


# --- the next version ------------------------------------------------------------------------


def draft_lines(
    lines: Sequence[Line], bases: Sequence[Base], targets: Sequence[Bits], step: int
) -> list[Draft]:
    """Every format's draft of the next version; `repeated` all of them, or none."""
    drafts = [
        draft_version(line.how, base, line.history, target, step)
        for line, base, target in zip(lines, bases, targets, strict=True)
    ]
    if all(draft.repeated for draft in drafts):
        return drafts
    return [
        draft_version(altered(line.how, repeats=False), base, line.history, target, step)
        if draft.repeated
        else draft
        for line, base, target, draft in zip(lines, bases, targets, drafts, strict=True)
    ]


def joined_manifest(lines: Sequence[Line], drafts: Sequence[Draft]) -> Manifest:
    """The one manifest that commits all drafts, signed if this run is."""
    return lines[0].how.finished(joined([draft.manifest for draft in drafts]))


def derived(
    lines: Sequence[Line],
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    bases: Sequence[Base],
) -> list[Bits]:
    """What each line serves for these masters, in memory of its own.

    Tensors given as bits are served as they are, in every format.
    """
    from farcast.formats.deriving import derive

    masters, given = _masters(tensors)
    targets = []
    for line, base in zip(lines, bases, strict=True):
        if line.recipe is None:
            raise ConfigError("This line has no recipe, so nothing can be derived for it.")
        before: dict[str, Any] = {}
        if line.recipe.sticky and base.weights is not None:
            before = {name: _as_torch(bits) for name, bits in base.weights.bits.items()}
        served = derive(masters, line.recipe, previous=before)
        if line.recipe.layout.quantised and served.keys() == masters.keys():
            raise ConfigError(
                f"Nothing would be quantised as {line.recipe}: no tensor has a name that its rule "
                f"({line.recipe.rule}) knows, or the groups do not divide the columns."
            )
        clash = sorted(served.keys() & given.keys())
        if clash:
            raise TensorMismatchError(
                f"The tensor {clash[0][:80]!r} is given as bits, and would be derived too."
            )
        own = {name: held_bits(tensor) for name, tensor in served.items()}
        targets.append(own | {name: bits.copied() for name, bits in given.items()})
    return targets


def _masters(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
) -> tuple[dict[str, Any], dict[str, AnyBits]]:
    """By canonical name: tensors to derive from, and bits to pass on."""
    pairs = dict(tensors) if isinstance(tensors, Mapping) else _drawn(tensors)
    names = canonical_names(pairs)
    given = {names[n]: t for n, t in pairs.items() if isinstance(t, AnyBits)}
    masters = {names[n]: _as_torch(t) for n, t in pairs.items() if not isinstance(t, AnyBits)}
    return masters, given


def _drawn(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Copies of what a generator gives, which may fill one buffer again and again."""
    drawn: dict[str, Any] = {}
    for name, tensor in pairs:
        if name in drawn:
            raise TensorMismatchError(f"The tensor {name!r} is given twice; give it once.")
        drawn[name] = tensor.detach().clone() if hasattr(tensor, "detach") else _copied(tensor)
    return drawn


def _copied(tensor: Any) -> Any:
    return tensor.copied() if isinstance(tensor, AnyBits) else _as_torch(tensor).clone()


def _as_torch(tensor: Any) -> Any:
    import torch

    if isinstance(tensor, torch.Tensor):
        return tensor
    bits = tensor if isinstance(tensor, AnyBits) else to_bits(tensor)
    return from_bits(bits, torch.empty(0))
