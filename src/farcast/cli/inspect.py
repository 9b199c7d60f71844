"""`farcast inspect`: the lineage of a run, version by version."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from farcast.cli import options
from farcast.types import VersionRef

if TYPE_CHECKING:
    from rich.table import Table

    from farcast.lineage import Manifest
    from farcast.store.archive import Archive

SHOWN = 40


class VersionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One version, as `inspect` shows it. Bytes are those of the objects in the store."""

    version: int
    step: int
    root: str
    bytes_anchor: int
    bytes_deltas: dict[int, int]
    """By base version: that of the version before, and of those that were squashed."""
    objects: int
    bytes_full: int
    changed_fraction: float
    writer: str
    signed: bool
    formats: dict[str, str] = {}
    """The root of each served format; `farcast plan --format` shows the way to one."""
    origin: VersionRef | None = None
    """What this run was forked from."""


class DamagedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A version whose manifest nobody can use."""

    version: int
    reason: str


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """What `farcast inspect --json` writes."""

    run_id: str
    versions: tuple[VersionLine, ...]
    damaged: tuple[DamagedLine, ...]


def inspect(
    store: options.Store,
    last: Annotated[
        int, typer.Option(metavar="N", min=1, help="Print this many of the newest versions.")
    ] = SHOWN,
    trusted_key: options.TrustedKeyFile = None,
    json: options.Json = None,
) -> None:
    """Show the graph of versions: anchors, deltas, and squashed deltas from further back.

    A line is a version. ● was published in full, ○ as the change from the version before; "-4"
    below squashed is the change from 4 versions before, for replicas that fell behind. ! is a
    damaged one, which everybody passes over. `--json` has all versions, whatever is printed.

    ```
    farcast inspect --store runs/demo/store
    farcast inspect --store s3://bucket/run1 --last 200 --json lineage.json
    ```
    """
    from rich.console import Console

    from farcast.fleet.finding import open_archive
    from farcast.store import open_store

    options.check_writable(json)
    archive = open_archive(open_store(store), options.trusted_key(trusted_key))
    lineage = _read(archive)
    Console().print(_table(lineage, last))
    print(_summary(lineage, last))
    options.write_json(json, lineage)


def _read(archive: "Archive") -> Lineage:
    from farcast.fleet.finding import versions_in
    from farcast.lineage import UNUSABLE

    lines: list[VersionLine] = []
    damaged: list[DamagedLine] = []
    for version in versions_in(archive.store):
        try:
            lines.append(_line(archive.manifest(version)))
        except UNUSABLE as error:
            damaged.append(DamagedLine(version=version, reason=str(error)))
    return Lineage(run_id=archive.run_id, versions=tuple(lines), damaged=tuple(damaged))


def _line(manifest: "Manifest") -> VersionLine:
    return VersionLine(
        version=manifest.version,
        step=manifest.step,
        root=manifest.root,
        bytes_anchor=sum(ref.size for ref in manifest.anchor or ()),
        bytes_deltas={d.base: sum(ref.size for ref in d.objects) for d in manifest.deltas},
        objects=len({ref.digest for ref in manifest.objects}),
        bytes_full=manifest.bytes_full,
        changed_fraction=manifest.changed / manifest.elements if manifest.elements else 0.0,
        writer=manifest.writer,
        signed=manifest.signature is not msgspec.UNSET,
        formats={view.served_format: view.root for view in manifest.views},
        origin=None if manifest.origin is msgspec.UNSET else manifest.origin,
    )


def _table(lineage: Lineage, last: int) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.title = f"run {lineage.run_id}"
    table.title_justify = "left"
    for heading in ("", "version", "step", "root", "anchor", "delta", "squashed", "changed"):
        left = heading in ("", "root", "squashed")
        table.add_column(
            heading, justify="left" if left else "right", no_wrap=heading != "squashed"
        )
    rows: list[VersionLine | DamagedLine] = [*lineage.versions, *lineage.damaged]
    rows.sort(key=lambda row: row.version)
    for row in rows[-last:]:
        if isinstance(row, VersionLine):
            table.add_row(*_cells(row))
        else:
            table.add_row("!", str(row.version), "", "damaged")
    return table


def _cells(line: VersionLine) -> tuple[str, ...]:
    from farcast.dashboard.figures import human_bytes

    before = line.bytes_deltas.get(line.version - 1)
    squashed = (
        f"{base - line.version}: {human_bytes(size)}"
        for base, size in sorted(line.bytes_deltas.items(), reverse=True)
        if base != line.version - 1
    )
    return (
        "●" if line.bytes_anchor else "○",
        str(line.version),
        str(line.step),
        line.root[:12],
        human_bytes(line.bytes_anchor) if line.bytes_anchor else "",
        "" if before is None else human_bytes(before),
        ", ".join(squashed),
        f"{line.changed_fraction:.3%}",
    )


def _summary(lineage: Lineage, last: int) -> str:
    lines = lineage.versions
    anchors = sum(1 for line in lines if line.bytes_anchor)
    squashes = sum(1 for line in lines for base in line.bytes_deltas if base != line.version - 1)
    signed = sum(line.signed for line in lines)
    said = [
        f"{len(lines)} versions, {anchors} in full, {squashes} squashed deltas, "
        f"{'all' if signed == len(lines) and signed else signed or 'none'} signed."
    ]
    hidden = len(lines) + len(lineage.damaged) - last
    if hidden > 0:
        said.append(f"{hidden} earlier ones are not shown; --last {last + hidden} shows them.")
    said += [f"Forked from {line.origin}." for line in lines if line.origin is not None]
    said += [f"Version {bad.version} is damaged: {bad.reason}" for bad in lineage.damaged]
    return "\n".join(said)
