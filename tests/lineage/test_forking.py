"""A run begins as another run's version: same bits, its origin in the first manifest."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from farcast.cli.main import main
from farcast.config import RunConfig, decode_config, encode_config
from farcast.errors import ConfigError, FormatError
from farcast.fleet.forking import fork_run
from farcast.fleet.keys import write_pair
from farcast.fleet.layout import RunFolder
from farcast.lineage import RunRecord, Signer, check_manifest
from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, Subscriber
from farcast.store import MemoryStore, Store, open_store
from farcast.store.archive import Archive
from farcast.types import VersionRef
from version_world import RUN, bits_of, contents, rebuilt, tensors

CONFIG = RunConfig(run_id=RUN, store="memory://", model="tiny", out="old")


def run_of(store: Store, versions: int = 4, *, settings: bool = True) -> list[VersionRef]:
    archive = Archive(store, RUN)
    told = encode_config(CONFIG).decode() if settings else ""
    assets = {"config.json": archive.put_object(b"{}")}
    archive.create_run(RunRecord(run_id=RUN, created="now", assets=assets, settings=told))
    with Publisher(store, RUN, anchor_every=3) as publisher:
        return [publisher.publish(tensors(step), step=step) for step in range(versions)]


@pytest.mark.parametrize("version", [None, 0, 2])
def test_a_fork_has_the_bits_and_names_its_origin(tmp_path: Path, version: int | None) -> None:
    old = MemoryStore()
    refs = run_of(old)
    before = contents(old)
    folder = RunFolder(tmp_path / "two")
    forked = fork_run(
        old, str(tmp_path / "store"), version=version, run_id="run2", folder=folder, steps=7
    )
    number = 3 if version is None else version
    assert (forked.origin, forked.ref) == (refs[number], VersionRef("run2", 0, refs[number].root))
    new = open_store(tmp_path / "store")
    assert rebuilt(new, 0, run_id="run2") == bits_of(tensors(number))
    assert Archive(new, "run2").manifest(0).origin == refs[number]
    record = Archive(new, "run2").open_run()
    assert Archive(new, "run2").get_object(record.assets["config.json"]) == b"{}"
    config = folder.read_config()
    assert config == decode_config(record.settings.encode(), RunConfig)
    assert (config.run_id, config.train.steps, config.fork_of) == ("run2", 7, refs[number])
    assert (Path(config.model) / "config.json").read_bytes() == b"{}"
    assert CheckpointDirectory(Path(config.model)).ref == forked.ref
    assert contents(old) == before


def test_a_trainer_goes_on_from_a_fork_and_only_there(tmp_path: Path) -> None:
    old = MemoryStore()
    refs = run_of(old)
    fork_run(
        old,
        str(tmp_path / "store"),
        version=1,
        run_id="run2",
        folder=RunFolder(tmp_path / "two"),
    )
    new = open_store(tmp_path / "store")
    with Publisher(new, "run2", fork_of=refs[1]) as publisher:
        ref = publisher.publish(tensors(9), step=1)
    assert ref.version == 1
    target = CheckpointDirectory(tmp_path / "model")
    Subscriber(new, "run2", target).sync()
    assert target.ref == ref


def test_what_cannot_be_forked_is_refused(tmp_path: Path) -> None:
    old = MemoryStore()
    refs = run_of(old, settings=False)
    forked = fork_run(
        old, str(tmp_path / "s"), version=1, run_id="run2", folder=RunFolder(tmp_path / "f")
    )
    assert not forked.trainable  # there is no trainer of ours to go on with
    assert not (tmp_path / "f").exists()
    used, empty = RunFolder(tmp_path), RunFolder(tmp_path / "f")
    with pytest.raises(Exception, match="already holds the run"):
        fork_run(old, str(tmp_path / "s"), version=1, run_id="run3", folder=empty)
    with pytest.raises(ConfigError, match="other files"):
        fork_run(old, str(tmp_path / "t"), version=1, run_id="run3", folder=used)
    assert not (tmp_path / "t" / "run.json").exists()
    with pytest.raises(ConfigError, match="fork of itself"):
        Publisher(MemoryStore(), RUN, fork_of=refs[0])
    with (
        Publisher(MemoryStore(), "run2", fork_of=refs[0]) as publisher,
        pytest.raises(ConfigError, match="must be what"),
    ):
        publisher.publish(tensors(1), step=0)


def test_only_a_first_version_has_an_origin() -> None:
    store = MemoryStore()
    refs = run_of(store)
    manifest = Archive(store, RUN).manifest(1)
    elsewhere = VersionRef("run0", 3, refs[0].root)
    for broken in (
        replace(manifest, origin=elsewhere),
        replace(Archive(store, RUN).manifest(0), origin=refs[0]),
    ):
        with pytest.raises(FormatError, match="origin"):
            check_manifest(broken)
    check_manifest(replace(Archive(store, RUN).manifest(0), origin=elsewhere))


@pytest.fixture
def farcast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out + said.err

    return run


Farcast = Callable[..., tuple[int, str]]


def test_the_commands_fork_show_plan_and_collect(farcast: Farcast, tmp_path: Path) -> None:
    signer = write_pair(tmp_path / "k") and Signer.load((tmp_path / "k").read_bytes())
    store = open_store(tmp_path / "old")
    archive = Archive(store, RUN)
    record = RunRecord(run_id=RUN, created="now", settings=encode_config(CONFIG).decode())
    archive.create_run(signer.sign(record))
    with Publisher(store, RUN, anchor_every=8, squash=4, signer=signer) as publisher:
        for step in range(20):
            publisher.publish(tensors(step), step=step)

    told = ("--trusted-key", "k.pub")
    status, out = farcast(
        *("fork", "--store", "old", "--version", "6", "--to", "new", "--out", "two"),
        *("--run-id", "run2", "--signing-key", "k", *told),
    )
    assert (status, "run2@0" in out, f"{RUN}@6" in out) == (0, True, True), out
    status, out = farcast("inspect", "--store", "new", *told)
    assert (status, f"Forked from {RUN}@6" in out) == (0, True), out

    status, out = farcast("inspect", "--store", "old", "--last", "12", "--json", "l.json", *told)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "20 versions, 3 in full, 5 squashed deltas, all signed." in out
    assert "-4: " in out
    assert "8 earlier ones are not shown" in out
    lineage = json.loads((tmp_path / "l.json").read_bytes())
    assert [line["version"] for line in lineage["versions"]] == list(range(20))
    assert list(lineage["versions"][16]["bytes_deltas"]) == ["15", "12", "0"]

    status, out = farcast(
        *("plan", "--store", "old", "--have", "2", "--link", "1mbit,80ms", "--json", "p.json"),
        *told,
    )
    assert (status, "seconds" in out) == (0, True)
    planned = json.loads((tmp_path / "p.json").read_bytes())
    assert planned["seconds"] > 0.08
    assert planned["objects"] == sum(len(step["objects"]) for step in planned["steps"])

    store.put("versions/000000000003.json", b"damaged")
    status, out = farcast("inspect", "--store", "old")
    assert (status, "Version 3 is damaged" in out) == (0, True), out

    gc = ("gc", "--store", "old", "--keep", "2", "--grace", "0", *told)
    before = contents(store)
    status, out = farcast(*gc, "--dry-run", "--json", "g.json")
    assert (status, "nothing was removed" in out) == (0, True), out
    assert {k: v for k, v in contents(store).items() if "fleet/clock" not in k} == before
    status, out = farcast(*gc, "--json", "h.json")
    assert status == 0
    dry, wet = (json.loads((tmp_path / name).read_bytes()) for name in ("g.json", "h.json"))
    assert wet == {**dry, "dry_run": False}
    assert wet["versions"] == list(range(16))
    fresh = CheckpointDirectory(tmp_path / "model")
    assert Subscriber(store, RUN, fresh, trusted_key=signer.public).sync().version == 19
    assert msgspec.json.decode(contents(store)["timestamp.json"])["version"] == 19
