"""`farcast inspect`: the lineage of a run, version by version."""

from typing import TYPE_CHECKING

import msgspec

from farcast.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from farcast.lineage import Manifest


class VersionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One version, as `inspect` shows it. Bytes are those of the objects in the store."""

    version: int
    step: int
    root: str
    bytes_anchor: int
    bytes_deltas: dict[int, int]
    """By base version."""
    bytes_full: int
    changed_fraction: float
    writer: str


def inspect(
    store: options.Store,
    trusted_key: options.TrustedKeyFile = None,
    json: options.Json = None,
) -> None:
    """Show every version of a run: step, root, and the bytes of its anchor and deltas.

    ```
    farcast inspect --store runs/demo/store
    ```
    """
    from rich.console import Console

    from farcast.fleet.finding import open_archive, versions_in
    from farcast.store import open_store

    options.check_writable(json)
    archive = open_archive(open_store(store), options.trusted_key(trusted_key))
    lines = [_line(archive.manifest(version)) for version in versions_in(archive.store)]
    Console().print(_table(archive.run_id, lines))
    options.write_json(json, {"run_id": archive.run_id, "versions": lines})


def _line(manifest: "Manifest") -> VersionLine:
    return VersionLine(
        version=manifest.version,
        step=manifest.step,
        root=manifest.root,
        bytes_anchor=sum(ref.size for ref in manifest.anchor or ()),
        bytes_deltas={d.base: sum(ref.size for ref in d.objects) for d in manifest.deltas},
        bytes_full=manifest.bytes_full,
        changed_fraction=manifest.changed / manifest.elements if manifest.elements else 0.0,
        writer=manifest.writer,
    )


def _table(run_id: str, lines: list[VersionLine]) -> "Table":
    from rich.table import Table

    from farcast.dashboard.figures import human_bytes, times

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=f"run {run_id}")
    table.title_justify = "left"
    for heading in ("version", "step", "root", "anchor", "deltas", "less", "changed"):
        table.add_column(heading, justify="left" if heading in ("root", "deltas") else "right")
    for line in lines:
        deltas = ", ".join(f"{base}: {human_bytes(n)}" for base, n in line.bytes_deltas.items())
        smallest = min(line.bytes_deltas.values(), default=line.bytes_anchor)
        table.add_row(
            str(line.version),
            str(line.step),
            line.root[:12],
            human_bytes(line.bytes_anchor) if line.bytes_anchor else "",
            f"from {deltas}" if deltas else "",
            times(line.bytes_full, smallest),
            f"{line.changed_fraction:.3%}",
        )
    return table
