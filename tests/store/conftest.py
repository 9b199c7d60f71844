"""Every backend that runs here, behind one fixture. Servers start when a test first asks."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farcast.config import LinkConfig
from farcast.store import CountingStore, LinkedStore, MemoryStore, Store, open_store
from farcast.store.testing import FaultStore
from s3_stub import S3Stub
from servers import Bucket, azurite, moto, seaweed


@pytest.fixture(scope="session")
def seaweed_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as bucket:
        yield bucket


@pytest.fixture(scope="session")
def moto_bucket() -> Iterator[Bucket]:
    with moto() as bucket:
        yield bucket


@pytest.fixture(scope="session")
def azurite_container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Store]]:
    with azurite(tmp_path_factory.mktemp("azurite")) as open_prefix:
        yield open_prefix


@pytest.fixture
def stub() -> Iterator[S3Stub]:
    with S3Stub() as server:
        yield server


Make = Callable[[], Store]

SHORT_LINK = LinkConfig(rate=1e9, rtt=0.0002)

BACKENDS = [
    "file",
    "memory",
    "counting",
    "linked",
    "fault",
    "seaweed",
    "moto",
    "google-stub",
    pytest.param("azurite", marks=pytest.mark.full),
]


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Opens the same fresh, empty store each time it is called."""
    kind = request.param
    if kind == "file":
        return lambda: open_store(f"file://{tmp_path}/new/store")
    if kind in ("seaweed", "moto"):
        bucket: Bucket = request.getfixturevalue(f"{kind}_bucket")
        prefix = f"run-{secrets.token_hex(6)}/deep"
        return lambda: bucket.open(prefix)
    if kind == "google-stub":
        stub: S3Stub = request.getfixturevalue("stub")
        return lambda: stub.open_google()
    if kind == "azurite":
        open_prefix: Callable[[str], Store] = request.getfixturevalue("azurite_container")
        name = f"run-{secrets.token_hex(6)}"
        return lambda: open_prefix(name)
    inner = MemoryStore()
    wrapped: dict[str, Make] = {
        "memory": lambda: inner,
        "counting": lambda: CountingStore(inner),
        "linked": lambda: LinkedStore(inner, SHORT_LINK),
        "fault": lambda: FaultStore(inner),
    }
    return wrapped[kind]


@pytest.fixture
def store(make: Make) -> Store:
    return make()
