"""Begins a run as a version of another one: same bits, same small files, same settings.

    check the new store and folder -> version of the old run, verified -> model folder -> files and
    version 0 into the new store -> its record, which makes it a run -> configuration

A stop in between leaves a store without a run record, and a folder without a configuration: the
same command may be given again once that folder is removed. Refuses a store that holds a run, and
to write into the old one.
"""

import datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from farcast.config import RunConfig, decode_config, encode_config
from farcast.errors import ConfigError
from farcast.fleet.assets import fetch_assets
from farcast.fleet.finding import newest_manifest, open_archive, require_unused
from farcast.fleet.keys import read_signer
from farcast.fleet.layout import RunFolder
from farcast.lineage import RunRecord, Signer, TrustedKey
from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, Subscriber
from farcast.store import Store, open_store
from farcast.store.archive import Archive
from farcast.store.probe import probe_conditional_put
from farcast.types import VersionRef


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
    target = open_store(target_url)
    require_unused(target)
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise ConfigError(f"{folder.path} holds other files; name an empty or a new folder.")
    signer = None if signing_key is None else read_signer(signing_key)
    record = old.open_run()
    manifest = newest_manifest(old) if version is None else old.manifest(version)
    probe_conditional_put(target)

    with Publisher(
        target,
        run_id,
        served_format=manifest.served_format,
        fork_of=manifest.ref,
        signer=signer,
    ) as publisher:
        ref = publisher.publish(old.rebuild(manifest.version), step=0, allow_poison=True)

    new = Archive(target, run_id, trusted=None if signer is None else signer.public)
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
