"""Rows as tables for a person."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from farcast.bench.measure import Row
from farcast.bench.on_device import DeviceReport
from farcast.bench.squashing import SquashRow
from farcast.bench.suite import Machine

WIDE = 112
"""Columns of a terminal that also show two cores and scratch memory."""

NO_BF16 = (
    "The recording holds no BF16 weights, which changes of a chosen density are made of: "
    "those were left out."
)

_HEADINGS = ("coding", "bits", "/bound", "factor", "encode", "/copy", "decode", "/copy")
_WIDE_HEADINGS = ("2 cores", "copy", "scratch MiB")

_WIDE_NOTE = (
    " Pairs: encode / decode. 2 cores: speed over that of one; copy: what the memcpy gains from "
    "two, the limit where memory is."
)


def show(
    rows: Sequence[Row],
    device: DeviceReport,
    squashes: Sequence[SquashRow],
    machine: Machine,
    console: Console,
) -> None:
    """All tables, one for each change, and how to read them."""
    wide = console.width >= WIDE
    for _, group in groupby(rows, key=lambda row: (row.data, row.hop)):
        console.print(table_of(list(group), wide=wide))
    if device.rows:
        console.print(device_table(device))
    for squash in squashes:
        console.print(_squashed(squash))
    console.print(_notes(rows, machine, wide=wide))
    console.print(Text(device.note, style="dim"))


def table_of(rows: Sequence[Row], *, wide: bool) -> Group:
    """The codings on one change; the smallest is green."""
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False, header_style="dim")
    for heading in _HEADINGS + (_WIDE_HEADINGS if wide else ()):
        table.add_column(heading, justify="left" if heading == "coding" else "right", no_wrap=True)
    smallest = min(row.bits_per_changed for row in rows)
    for row in rows:
        cells = [Text(cell) for cell in _cells(row) + (_wide_cells(row) if wide else [])]
        if row.bits_per_changed == smallest:
            cells[1].stylize("green")
        table.add_row(*cells, style="bold" if row.origin == "own" else "")
    return Group(*_heading(rows[0]), table, Text())


def device_table(device: DeviceReport) -> Group:
    """farcast on a GPU, a line for each change."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for heading in ("change", "encode", "/copy", "decode", "/copy", "copy"):
        table.add_column(heading, justify="left" if heading == "change" else "right", no_wrap=True)
    for row in device.rows:
        speeds = (row.encode_gb_s, row.encode_of_copy, row.decode_gb_s, row.decode_of_copy)
        cells = [f"{number:.3g}" for number in (*speeds, row.copy_gb_s)]
        table.add_row(Text(f"{row.data}, {row.hop}"), *cells)
    title = Text(f"farcast on {device.device}", style="bold cyan")
    title.append("   GB/s of the whole served version", style="not bold default")
    return Group(title, table, Text())


def _squashed(row: SquashRow) -> Text:
    text = Text(f"{row.data}, {row.hop} squashed", style="bold cyan")
    text.append(
        f"   {row.bytes_squash:,} bytes, {row.squash_over_chain:.2f} of the {row.deltas} single "
        f"deltas' {row.bytes_chain:,}\n",
        style="not bold default",
    )
    return text


def _heading(row: Row) -> tuple[Text, Padding]:
    title = Text(f"{row.data}, {row.hop}", style="bold cyan")
    counted = f"{row.changed:,} of {row.elements:,} elements changed ({100 * row.density:.4g} %)"
    bound = f"bound {row.bound_bits:.2f} bits a changed element"
    if row.bound_independent_bits > row.bound_bits:
        bound += f", {row.bound_independent_bits:.2f} if positions were independent"
    title.append(f"   {counted}", style="not bold default")
    return title, Padding(Text(bound, style="dim"), (0, 0, 0, 2))


def _cells(row: Row) -> list[str]:
    return [
        _short(row.coding),
        f"{row.bits_per_changed:.2f}",
        f"{row.over_bound:.2f}",
        f"{row.factor:,.1f}x" if row.factor < 100 else f"{row.factor:,.0f}x",
        f"{row.encode_gb_s:.2f}{'*' if row.own_threads else ''}",
        f"{row.encode_of_memcpy:.2f}",
        f"{row.decode_gb_s:.2f}",
        f"{row.decode_of_memcpy:.2f}",
    ]


def _wide_cells(row: Row) -> list[str]:
    mib = [n / (1 << 20) for n in (row.encode_scratch_bytes, row.decode_scratch_bytes)]
    copy = "" if row.copy_two_cores is None else f"{row.copy_two_cores:.2f}x"
    return [
        _pair(row.encode_two_cores, row.decode_two_cores), copy, f"{mib[0]:.1f} / {mib[1]:.1f}",
    ]  # fmt: skip


def _pair(encode: float | None, decode: float | None) -> str:
    return "" if encode is None or decode is None else f"{encode:.2f}x / {decode:.2f}x"


def _short(name: str) -> str:
    """The coding without the projects that use it, which the notes name."""
    return name.partition(" (")[0]


def _notes(rows: Sequence[Row], machine: Machine, *, wide: bool) -> Text:
    text = Text(style="dim")
    text.append(
        "bits: a changed element. /bound: of positions given the old exponent or code. encode, "
        "decode: GB/s of the whole served version, one core. /copy: of a memcpy of the same bytes "
        f"in the same minute.{_WIDE_NOTE if wide else ''} Every decoding was "
        "compared with its target, bit for bit.\n"
        "Only farcast's bytes hold names, shapes and digests. 'Digests apart': those of the "
        "tensors at hand, as the others make none. *: threads of its own.\n"
    )
    used = dict.fromkeys(row.coding for row in rows if "(" in row.coding)
    text.append(
        "Written anew from published descriptions, or a package: " + "; ".join(used) + ".\n"
    )
    if all(row.data != "synthetic" for row in rows):
        text.append(NO_BF16 + "\n")
    text.append(f"{machine.processor}, {machine.cores} cores, load {machine.load:.1f}.")
    if machine.is_busy:
        text.append(
            " The machine was busy with other work: ratios hold better than speeds, and two "
            "cores gain less than they would.",
            style="not dim yellow",
        )
    return text
