"""`farcast plan`: what a replica would fetch, before it does."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from farcast.cli import options
from farcast.config import parse_link

if TYPE_CHECKING:
    from farcast.lineage import Costs, Plan


def plan(
    store: options.Store,
    have: Annotated[
        int | None, typer.Option(min=0, metavar="VERSION", help="Held now. [default: nothing]")
    ] = None,
    want: Annotated[
        int | None, typer.Option(min=0, metavar="VERSION", help="Wanted. [default: the newest]")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,RTT",
            help="Over this link, e.g. 100mbit,80ms: the quickest path, with its seconds.",
        ),
    ] = None,
    trusted_key: options.TrustedKeyFile = None,
    format: options.ServedFormat = None,
    json: options.Json = None,
) -> None:
    """Show the cheapest way from one version to another: in bytes, or in seconds over a link.

    ```
    farcast plan --store runs/demo/store                      # from nothing
    farcast plan --store runs/demo/store --have 3 --want 8    # from behind
    farcast plan --store runs/demo/store --link 100mbit,80ms  # in seconds
    ```
    """
    costs = None if link is None else _costs(link)

    from farcast.fleet.finding import newest_manifest, open_archive
    from farcast.store import open_store

    options.check_writable(json)
    archive = open_archive(open_store(store), options.trusted_key(trusted_key), format)
    target = newest_manifest(archive) if want is None else archive.manifest(want)
    start = archive.manifest(have).ref if have is not None else None
    found = archive.plan(start, target.ref, costs)
    print(found)
    options.write_json(json, _told(found))


def _costs(link: str) -> "Costs":
    from farcast.lineage import Costs

    told = parse_link(link)
    return Costs(rate=told.rate, rtt=told.rtt)


def _told(plan: "Plan") -> dict[str, Any]:
    return {
        "have": plan.have,
        "want": plan.want,
        "steps": plan.steps,
        "bytes_full": plan.bytes_full,
        "bytes": plan.bytes,
        "objects": plan.objects,
        "seconds": plan.seconds,
    }
