"""`farcast fork`: begin a run as a version of another one."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options


def fork(
    store: options.Store,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="The new run's store, unused.")],
    version: Annotated[
        int | None,
        typer.Option(min=0, metavar="VERSION", help="Where it begins. [default: the newest]"),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="The new run's name. [default: made up]")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the new run, for its trainer.")
    ] = Path("runs/fork"),
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Optimizer steps. [default: as the other run]"),
    ] = None,
    trusted_key: options.TrustedKeyFile = None,
    signing_key: options.SigningKeyFile = None,
    json: options.Json = None,
) -> None:
    """Begin a run as another run's version, with its settings; the other run stays as it is.

    Version 0 of the new run has the same root and names where it came from, which `farcast
    inspect` shows. The optimizer's state is not in a store: it begins anew.

    ```
    farcast fork --store s3://bucket/run1 --version 120 \\
        --to s3://bucket/run2 --out runs/two
    farcast train --out runs/two --resume
    ```
    """
    from farcast.fleet.forking import fork_run
    from farcast.fleet.layout import RunFolder
    from farcast.store import open_store

    options.check_writable(json)
    folder = RunFolder(out)
    forked = fork_run(
        open_store(store),
        to,
        version=version,
        run_id=run_id or f"{options.name_of(folder.path)}-{secrets.token_hex(3)}",
        folder=folder,
        steps=steps,
        trusted=options.trusted_key(trusted_key),
        signing_key=signing_key,
    )
    print(f"{forked.ref} begins as {forked.origin}.")
    if forked.trainable:
        print(f"Go on with `{options.program()} train --out {folder.shown} --resume`.")
    else:
        print("The other run has no trainer's settings; publish to it as your own trainer does.")
    options.write_json(json, forked)
