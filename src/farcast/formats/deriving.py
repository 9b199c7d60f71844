"""Served tensors from master weights: `derive`. Needs torch. Pure.

Every matrix that the recipe's rule names becomes codes and scales under the names that engines
read; every other floating tensor is rounded to bf16 (fp16 for `fp16`), and what is neither float
nor wider than that is passed on as it is. Layouts:

    bf16, fp16       m.weight BF16 or F16
    fp8_block        m.weight F8_E4M3 [R, C], m.weight_scale_inv F32 [ceil(R/128), ceil(C/128)]
    fp8_channel      m.weight F8_E4M3 [R, C], m.weight_scale F32 [R, 1]
    int8             m.weight I8 [R, C], m.weight_scale F32 [R, 1]
    int4_gN          m.weight_packed I32 [R, C/8], m.weight_scale BF16 [R, C/N], m.weight_shape I64
    nvfp4            m.weight_packed U8 [R, C/2], m.weight_scale F8_E4M3 [R, C/16],
                     m.weight_global_scale F32 [1]
    mxfp4            m.weight_packed U8 [R, C/2], m.weight_scale U8 [R, C/32]

Two passes: first the largest magnitudes of what shares a scale (`measure`), then scales and codes.
Between them ranks that hold rows of one matrix exchange the maxima of what they found, so that
shards give exactly the rows that the whole would have.

Refuses values that are not finite where they would be quantised, and masters too large for fp16.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from farcast.errors import ConfigError, PoisonError
from farcast.formats.packing import pack_e2m1, pack_int4, unpack_e2m1, unpack_int4
from farcast.formats.precision import fused_with, quantised_module
from farcast.formats.recipes import Element, Layout, Recipe, parse_recipe
from farcast.formats.rounding import rounded
from farcast.formats.scales import (
    Scales,
    block_scales,
    mxfp4_scales,
    nvfp4_global,
    nvfp4_scales,
)

Tensors = Mapping[str, torch.Tensor]

_CHUNK = 1 << 22
"""Weights worked on at a time: bounds what float64 and the scales of each weight take."""


class Rows(NamedTuple):
    """The rows that a tensor is of a matrix of `total` rows."""

    start: int
    total: int


def derive(
    masters: Tensors,
    recipe: Recipe | str,
    *,
    previous: Tensors | None = None,
    rows: Mapping[str, Rows] | None = None,
    measured: Tensors | None = None,
) -> dict[str, torch.Tensor]:
    """The served tensors of float32 (or narrower) `masters`, by canonical name.

    `previous` are those of the version before, for recipes that are `sticky`; without them, or for
    tensors that changed their shape, scales and codes are chosen afresh. `rows` says of which rows
    a tensor is (a name left out is whole), and then the result holds what belongs to these rows,
    and in full what belongs to the whole matrix; `measured` are then the elementwise maxima of what
    `measure` found for all rows. Nothing returned shares memory with what was
    given.

    Raises `PoisonError` for values that cannot be served, `ConfigError` for names that clash.
    """
    recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    before = previous if previous is not None and recipe.sticky else {}
    with torch.no_grad():
        matrices = dict(_matrices(masters, recipe, rows or {}))
        magnitudes = {
            name: measured[name].to(masters[name].device)
            if measured is not None and name in measured
            else _magnitudes(masters[name].detach(), recipe, matrix)
            for name, matrix in matrices.items()
        }
        _check_finite(magnitudes)
        if recipe.format == "nvfp4":
            over = _shared_maxima(magnitudes, matrices)
        served: dict[str, torch.Tensor] = {}
        for name, master in masters.items():
            if name in matrices:
                shared = over[name] if recipe.format == "nvfp4" else magnitudes[name]
                made = _quantised(master.detach(), recipe, matrices[name], shared, before)
            else:
                made = {name: _plain(name, master.detach(), recipe, before)}
            for key, tensor in made.items():
                if key in served or (key != name and key in masters):
                    raise ConfigError(
                        f"The tensor {key[:80]!r} would be served twice; rename the one that is "
                        "called like a scale."
                    )
                served[key] = tensor
    return served


def measure(
    masters: Tensors, recipe: Recipe | str, *, rows: Mapping[str, Rows]
) -> dict[str, torch.Tensor]:
    """The largest magnitudes of what may share a scale with rows held elsewhere, by the name of the
    master: float32, of the same shape on every rank. Empty for formats whose scales are of rows."""
    recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    if recipe.layout.block_rows == 1 and recipe.format != "nvfp4":
        return {}
    with torch.no_grad():
        return {
            name: _magnitudes(masters[name].detach(), recipe, matrix)
            for name, matrix in _matrices(masters, recipe, rows)
        }


def layout_of(name: str, recipe: Recipe | str, shape: tuple[int, ...]) -> dict[str, bool]:
    """The served tensors of a master, and whether each is of the same rows as the master (else it
    is one for the whole). `shape` is the whole master's."""
    recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    module = _module(name, shape, recipe)
    if module is None:
        return {name: True}
    return {f"{module}.{leaf}": by_row for leaf, by_row in _LEAVES[recipe.format].items()}


def unpacked(served: Tensors, recipe: Recipe | str) -> dict[str, torch.Tensor]:
    """The codes of each quantised matrix [R, C] by module path, one element a weight, and each
    other tensor as it is: for counting what changed."""
    recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    out = {}
    for name, tensor in served.items():
        module = name.removesuffix(".weight_packed")
        if module != name:
            tensor, name = _codes(tensor, recipe), module
        out[name] = tensor
    return out


# --- matrices --------------------------------------------------------------------------------


class _Matrix(NamedTuple):
    """A matrix to quantise: what its tensors are called after, and which rows are here."""

    module: str
    rows: Rows


_LEAVES: Mapping[str, Mapping[str, bool]] = {
    "fp8_block": {"weight": True, "weight_scale_inv": False},
    "fp8_channel": {"weight": True, "weight_scale": True},
    "int8": {"weight": True, "weight_scale": True},
    "int4_g32": {"weight_packed": True, "weight_scale": True, "weight_shape": False},
    "int4_g128": {"weight_packed": True, "weight_scale": True, "weight_shape": False},
    "nvfp4": {"weight_packed": True, "weight_scale": True, "weight_global_scale": False},
    "mxfp4": {"weight_packed": True, "weight_scale": True},
}
"""What a quantised matrix is served as, and which of that goes by its rows."""


def _module(name: str, shape: tuple[int, ...], recipe: Recipe) -> str | None:
    layout = recipe.layout
    if not layout.quantised:
        return None
    # Blocks of rows may be cut off at the edge; groups in a row may not.
    group = layout.group if layout.block_rows == 1 else None
    return quantised_module(name, shape, recipe.rule, group)


def _matrices(
    masters: Tensors, recipe: Recipe, rows: Mapping[str, Rows]
) -> Iterator[tuple[str, _Matrix]]:
    for name, master in masters.items():
        shape = tuple(master.shape)
        part = rows.get(name, Rows(0, shape[0] if shape else 0))
        module = _module(name, (part.total, *shape[1:]), recipe) if shape else None
        if module is not None and master.is_floating_point():
            yield name, _Matrix(module, part)


def _groups(layout: Layout, columns: int) -> tuple[int, int]:
    """How many groups a row has, and their size."""
    size = columns if layout.group is None else layout.group
    return -(-columns // size), size


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _magnitudes(master: torch.Tensor, recipe: Recipe, matrix: _Matrix) -> torch.Tensor:
    """The largest magnitude of what shares a scale, in float32: of blocks the whole matrix's, 0
    where no row is here; of groups those of the rows here; for nvfp4 one number."""
    layout = recipe.layout
    rows, columns = master.shape
    groups, size = _groups(layout, columns)
    found = torch.zeros(rows, groups, dtype=torch.float32, device=master.device)
    for part in _chunks(rows, columns):
        size_of = torch.zeros(
            part.stop - part.start, groups * size, dtype=torch.float32, device=master.device
        )
        size_of[:, :columns] = master[part].float().abs()
        found[part] = size_of.view(-1, groups, size).amax(-1)
    if recipe.format == "nvfp4":
        return found.amax().reshape(1) if found.numel() else found.new_zeros(1)
    if layout.block_rows == 1:
        return found
    return _block_maxima(found, layout.block_rows, matrix.rows)


def _block_maxima(found: torch.Tensor, height: int, rows: Rows) -> torch.Tensor:
    """From the maxima of each row here those of the whole matrix's blocks of rows."""
    blocks = found.new_zeros(-(-rows.total // height), found.shape[1])
    first, skipped = divmod(rows.start, height)
    touched = -(-(skipped + found.shape[0]) // height)
    padded = found.new_zeros(touched * height, found.shape[1])
    padded[skipped : skipped + found.shape[0]] = found
    blocks[first : first + touched] = padded.view(touched, height, found.shape[1]).amax(1)
    return blocks


def _block_of(layout: Layout, matrix: _Matrix, master: torch.Tensor) -> torch.Tensor:
    """The block that each row here belongs to."""
    here = torch.arange(master.shape[0], device=master.device)
    return (here + matrix.rows.start) // layout.block_rows


def _shared_maxima(magnitudes: Tensors, matrices: Mapping[str, _Matrix]) -> dict[str, torch.Tensor]:
    """Of matrices that engines fuse, the largest magnitude of all of them."""
    largest: dict[str, torch.Tensor] = {}
    for name, matrix in matrices.items():
        key = fused_with(matrix.module)
        held = largest.get(key)
        found = magnitudes[name]
        largest[key] = found if held is None else torch.maximum(held, found)
    return {name: largest[fused_with(matrix.module)] for name, matrix in matrices.items()}


def _check_finite(magnitudes: Tensors) -> None:
    wrong = [name for name, found in magnitudes.items() if not bool(found.isfinite().all())]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PoisonError(
            f"{', '.join(repr(name[:80]) for name in wrong[:3])}{more} hold values that are NaN or "
            "infinite, which no scale can serve; go back to a checkpoint."
        )


# --- codes -----------------------------------------------------------------------------------


def _quantised(
    master: torch.Tensor,
    recipe: Recipe,
    matrix: _Matrix,
    magnitudes: torch.Tensor,
    before: Tensors,
) -> dict[str, torch.Tensor]:
    """The served tensors of one matrix."""
    layout = recipe.layout
    names = [f"{matrix.module}.{leaf}" for leaf in _LEAVES[recipe.format]]
    codes_name, scale_name, *rest = names
    over: torch.Tensor | None = None
    if recipe.format == "nvfp4":
        over = nvfp4_global(
            recipe, magnitudes, _like(before.get(rest[0]), (1,), torch.float32, master)
        )
        magnitudes = _group_maxima(master, layout)
    scales = _scales(recipe, magnitudes, over, before.get(scale_name))
    old = before.get(codes_name)
    out = {codes_name: _packed(master, recipe, matrix, scales.numbers, old)}
    out[scale_name] = scales.served
    if over is not None:
        out[rest[0]] = over
    elif rest:
        out[rest[0]] = torch.tensor([matrix.rows.total, master.shape[1]], dtype=torch.int64)
    return out


def _group_maxima(master: torch.Tensor, layout: Layout) -> torch.Tensor:
    groups, size = _groups(layout, master.shape[1])
    return master.float().abs().view(-1, groups, size).amax(-1)


def _scales(
    recipe: Recipe, amax: torch.Tensor, over: torch.Tensor | None, before: torch.Tensor | None
) -> Scales:
    shape = tuple(amax.shape)
    if over is not None:
        return nvfp4_scales(recipe, amax, over, _like(before, shape, torch.float8_e4m3fn, amax))
    if recipe.format == "mxfp4":
        return mxfp4_scales(recipe, amax, _like(before, shape, torch.uint8, amax))
    dtype = torch.bfloat16 if recipe.layout.element == "int4" else torch.float32
    return block_scales(recipe, amax, _like(before, shape, dtype, amax))


def _packed(
    master: torch.Tensor,
    recipe: Recipe,
    matrix: _Matrix,
    numbers: torch.Tensor,
    old: torch.Tensor | None,
) -> torch.Tensor:
    """Codes of the rows here, as they are stored. `numbers` are by block or row, and by group."""
    layout = recipe.layout
    rows, columns = master.shape
    groups, size = _groups(layout, columns)
    parts = []
    blocks = _block_of(layout, matrix, master) if layout.block_rows > 1 else None
    made = _stored(recipe, (rows, columns), master.device)
    usable = _like(old, tuple(made.shape), made.dtype, master)
    for part in _chunks(rows, columns):
        by_row = numbers[part] if blocks is None else numbers[blocks[part]]
        each = by_row.unsqueeze(-1).expand(-1, groups, size).reshape(by_row.shape[0], -1)
        values = master[part].float() / each[:, :columns]
        held = None if usable is None else _codes(usable[part], recipe, columns)
        codes = rounded(layout.element, values, held, recipe.threshold)
        parts.append(_words(codes, recipe))
    return torch.cat(parts) if parts else made


def _stored(recipe: Recipe, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A stored tensor for a matrix of that shape, without values: what dtype and shape it has."""
    rows, columns = shape
    element = recipe.layout.element
    if element == "int4":
        return torch.empty(rows, -(-columns // 8), dtype=torch.int32, device=device)
    if element == "e2m1":
        return torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    dtype = torch.float8_e4m3fn if element == "e4m3" else torch.int8
    return torch.empty(rows, columns, dtype=dtype, device=device)


def _words(codes: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    element = recipe.layout.element
    if element == "int4":
        return pack_int4(codes)
    return pack_e2m1(codes) if element == "e2m1" else codes


def _codes(stored: torch.Tensor, recipe: Recipe, columns: int | None = None) -> torch.Tensor:
    element = recipe.layout.element
    if element == "int4":
        return unpack_int4(stored, stored.shape[1] * 8 if columns is None else columns)
    return unpack_e2m1(stored) if element == "e2m1" else stored


def _plain(name: str, master: torch.Tensor, recipe: Recipe, before: Tensors) -> torch.Tensor:
    """A tensor that stays in high precision."""
    element: Element = "fp16" if recipe.format == "fp16" else "bf16"
    dtype = torch.float16 if element == "fp16" else torch.bfloat16
    narrow = not master.is_floating_point() or master.element_size() < dtype.itemsize
    if narrow or master.dtype == dtype:
        return master.clone()
    old = _like(before.get(name), tuple(master.shape), dtype, master)
    flat = master.reshape(-1).float()
    held = None if old is None else old.reshape(-1)
    parts = [
        rounded(element, flat[p], None if held is None else held[p], recipe.threshold)
        for p in _chunks(flat.numel(), 1)
    ]
    served = torch.cat(parts) if parts else flat.to(dtype)
    if element == "fp16" and bool((served.isinf() & flat.isfinite()).any()):
        raise PoisonError(
            f"{name[:80]!r} holds values beyond 65504, the largest that fp16 has; serve bf16."
        )
    return served.reshape(master.shape)


def _like(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, near: torch.Tensor
) -> torch.Tensor | None:
    """The tensor on the device of `near`, if it is of that shape and dtype."""
    if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        return None
    return tensor.to(near.device)
