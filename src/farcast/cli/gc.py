"""`farcast gc`: remove versions that nobody needs any more."""

from typing import TYPE_CHECKING, Annotated

import typer

from farcast.cli import options
from farcast.errors import ConfigError

if TYPE_CHECKING:
    from farcast.fleet.registry import Registry
    from farcast.store import Garbage

KEEP = 256


def gc(
    store: options.Store,
    keep: Annotated[
        int, typer.Option(metavar="N", min=1, help="This many of the newest versions stay.")
    ] = KEEP,
    pin: Annotated[
        list[int] | None,
        typer.Option("--pin", min=0, metavar="VERSION", help="This one stays; may be repeated."),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Leave objects alone that are younger, in seconds."
        ),
    ] = 3600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go, and remove nothing.")
    ] = False,
    trusted_key: options.TrustedKeyFile = None,
    json: options.Json = None,
) -> None:
    """Remove old versions and objects that nothing names.

    What stays: the newest versions, those that replicas with a lease stand on, everything that
    leads from these to the newest, and the anchor before. A reader that is overtaken goes on at a
    newer version.

    A trainer collects for itself while it runs (`keep_versions` in its configuration, 256), so
    this is for runs that have ended, and for trainers on several ranks.

    ```
    farcast gc --store s3://bucket/run1 --dry-run
    farcast gc --store s3://bucket/run1 --keep 50 --pin 120
    ```
    """
    from farcast.fleet.finding import open_archive
    from farcast.fleet.leases import clock_of, held_versions
    from farcast.fleet.registry import Registry
    from farcast.store import collect_garbage, find_garbage, open_store

    options.check_writable(json)
    archive = open_archive(open_store(store), options.trusted_key(trusted_key))
    registry = Registry(archive.store)
    now = clock_of(registry).now()
    if not dry_run:
        _refuse_beside_a_trainer(registry, now)
    held = held_versions(registry.replicas(damaged=lambda *_: None), now)
    pinned = held | set(pin or ())
    act = find_garbage if dry_run else collect_garbage
    found = act(archive, keep=keep, pinned=pinned, grace=grace)
    print(found)
    if held:
        print(f"  replicas stand on versions {', '.join(map(str, sorted(held)))}")
    if found.versions or found.objects:
        print("  nothing was removed (--dry-run)" if dry_run else "  removed")
    options.write_json(json, _told(found, held, dry_run))


def _refuse_beside_a_trainer(registry: "Registry", now: float) -> None:
    from farcast.fleet.leases import life_of

    trainer, written = registry.trainer(), registry.trainer_written()
    if trainer is None or written is None or trainer.state in ("done", "stopped"):
        return
    if life_of(now - written) != "dead":
        raise ConfigError(
            f"The trainer of {trainer.run_id} is running and collects for itself: what it is about "
            "to publish may name what nothing names now. Look with --dry-run, or wait until it "
            "has ended."
        )


def _told(found: "Garbage", held: frozenset[int], dry_run: bool) -> dict[str, object]:
    return {
        "run_id": found.run_id,
        "dry_run": dry_run,
        "first_kept": found.first_kept,
        "versions": found.versions,
        "objects": [info.key for info in found.objects],
        "bytes": found.bytes,
        "held": sorted(held),
    }
