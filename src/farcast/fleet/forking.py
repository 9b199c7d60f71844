"""Begins a run as a version of another one: same bits in every served format, same small files,
same settings.

    check the new store and folder -> version of the old run, verified -> version 0 and files into
    the new store -> its record, which makes it a run -> configuration and model folder

A stop in between leaves a store without a run record, and a folder without a configuration: the
same command may be given again once that folder is removed. Refuses a store that holds a run or
other versions, and to write into the old one.
"""

import datetime
import secrets
from dataclasses import replace as altered
from pathlib import Path

import msgspec
from msgspec.structs import replace

from farcast.config import RunConfig, decode_config, encode_config
from farcast.errors import ConfigError, RunMismatchError
from farcast.fleet.assets import fetch_assets
from farcast.fleet.finding import newest_manifest, open_archive, require_unused
from farcast.fleet.keys import read_signer
from farcast.fleet.layout import RunFolder
from farcast.lineage import Manifest, RunRecord, Signer, TrustedKey, joined
from farcast.publish.drafting import Base, Drafting, draft_version
from farcast.publish.history import History
from farcast.publish.parts import PART_BYTES
from farcast.publish.timestamps import Timestamps
from farcast.replica import CheckpointDirectory, Subscriber
from farcast.store import Store, open_store
from farcast.store.archive import Archive
from farcast.store.probe import probe_conditional_put
from farcast.types import NAME_PATTERN, VersionRef


class Forked(msgspec.Struct, frozen=True, kw_only=True):
    """What `farcast fork` made."""

    ref: VersionRef
    origin: VersionRef
    trainable: bool
    """The other run had a trainer of farcast's, so `farcast train --resume` goes on."""


def fork_run(
    source: Store,
    target_url: str,
    *,
    version: int | None,
    run_id: str,
    folder: RunFolder,
    steps: int | None = None,
    trusted: TrustedKey | None = None,
    signing_key: Path | None = None,
) -> Forked:
    """Start the run `run_id` in `target_url` as `version` (None: the newest) of the one in
    `source`; `folder` gets its model and configuration."""
    old = open_archive(source, trusted)
    _check_id(run_id, old.run_id)
    target = open_store(target_url)
    require_unused(target)
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise ConfigError(f"{folder.path} holds other files; name an empty or a new folder.")
    signer = None if signing_key is None else read_signer(signing_key)
    record = old.open_run()
    manifest = newest_manifest(old) if version is None else old.manifest(version)
    probe_conditional_put(target)

    new = Archive(target, run_id, trusted=None if signer is None else signer.public)
    ref = _begin(new, old, manifest, signer)
    for asset in record.assets.values():
        new.put_object(old.get_object(asset))
    config = _config(record, run_id, target.url, folder, steps, manifest.ref, signing_key)
    new.create_run(_signed(_record(record, run_id, config), signer))
    if config is not None:
        model = Path(config.model)
        folder.create(config)
        Subscriber(
            target,
            run_id,
            CheckpointDirectory(model),
            trusted_key=new.trusted,
            on_expiry="warn",
        ).sync(ref)
        fetch_assets(new, record.assets, model)
    return Forked(ref=ref, origin=manifest.ref, trainable=config is not None)


def _check_id(run_id: str, other: str) -> None:
    if not NAME_PATTERN.fullmatch(run_id):
        raise ConfigError(
            f"{run_id[:60]!r} is no name for a run; use letters, digits and . _ -, beginning with "
            "a letter or digit, at most 128."
        )
    if run_id == other:
        raise ConfigError(f"{run_id!r} can't be a fork of itself; give the new run another id.")


def _begin(new: Archive, old: Archive, origin: Manifest, signer: Signer | None) -> VersionRef:
    """Commit `origin` as version 0 of the new run, or find that an earlier try did."""
    begun = new.newest()
    if begun is None:
        begun = _first_version(new, old, origin, signer)
        new.commit_manifest(begun)
    elif begun.version or begun.origin != origin.ref or _served(begun) != _served(origin):
        raise RunMismatchError(
            f"{new.store.url} already holds {begun.ref}, which is not {origin.ref} in all of its "
            f"formats ({', '.join(origin.served_formats)}); use an empty store prefix."
        )
    if signer is not None:
        Timestamps(new.store, signer).write(begun.ref)
    return begun.ref


def _served(manifest: Manifest) -> list[tuple[object, ...]]:
    return [(view.served_format, view.precision_rule, view.root) for view in manifest.views]


def _first_version(new: Archive, old: Archive, origin: Manifest, signer: Signer | None) -> Manifest:
    """A manifest that lacks only its commit: every format of `origin`, in full. One format is in
    memory at a time."""
    how = Drafting(
        archive=new,
        writer=f"fork-{secrets.token_hex(6)}",
        served_format=origin.served_format,
        anchor_every=1,
        squash=None,
        part_bytes=PART_BYTES,
        repeats=True,
        threads=new.threads,
        fork_of=origin.ref,
        signer=signer,
    )
    nothing = Base(newest=None, weights=None)
    views = []
    for view in origin.views:
        told = altered(how, served_format=view.served_format, precision_rule=view.precision_rule)
        reader = Archive(
            old.store, old.run_id, trusted=old.trusted, served_format=view.served_format
        )
        bits = reader.rebuild(view.version)
        views.append(draft_version(told, nothing, History(), bits, step=0).manifest)
    return how.finished(joined(views))


def _config(
    record: RunRecord,
    run_id: str,
    store: str,
    folder: RunFolder,
    steps: int | None,
    origin: VersionRef,
    signing_key: Path | None,
) -> RunConfig | None:
    """The old run's configuration, for the new one; None where a trainer of another kind ran."""
    if not record.settings:
        return None
    old = decode_config(record.settings.encode(), RunConfig)
    return replace(
        old,
        run_id=run_id,
        store=store,
        model=str(folder.path / "model"),
        out=str(folder.path),
        train=old.train if steps is None else replace(old.train, steps=steps),
        fork_of=origin,
        signing_key=None if signing_key is None else str(signing_key.expanduser().absolute()),
    )


def _record(old: RunRecord, run_id: str, config: RunConfig | None) -> RunRecord:
    told = "" if config is None else encode_config(replace(config, signing_key=None)).decode()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return RunRecord(run_id=run_id, created=now, assets=old.assets, settings=told)


def _signed(record: RunRecord, signer: Signer | None) -> RunRecord:
    return record if signer is None else signer.sign(record)
