"""`farcast plan`: what a replica would fetch, before it does."""

from typing import Annotated

import typer

from farcast.cli import options


def plan(
    store: options.Store,
    have: Annotated[
        int | None, typer.Option(min=0, metavar="VERSION", help="Held now. [default: nothing]")
    ] = None,
    want: Annotated[
        int | None, typer.Option(min=0, metavar="VERSION", help="Wanted. [default: the newest]")
    ] = None,
    trusted_key: options.TrustedKeyFile = None,
    json: options.Json = None,
) -> None:
    """Show the cheapest way, in bytes, from one version to another.

    ```
    farcast plan --store runs/demo/store                       # an empty replica to the newest
    farcast plan --store runs/demo/store --have 12 --want 30   # one that has fallen behind
    ```
    """
    from farcast.fleet.finding import newest_manifest, open_archive
    from farcast.store import open_store

    options.check_writable(json)
    archive = open_archive(open_store(store), options.trusted_key(trusted_key))
    target = newest_manifest(archive) if want is None else archive.manifest(want)
    found = archive.plan(archive.manifest(have).ref if have is not None else None, target.ref)
    print(found)
    options.write_json(json, found)
