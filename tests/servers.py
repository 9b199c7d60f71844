"""Real object-store servers for tests, each started on free ports of this machine and stopped
by its context. Independent programs, so that a shared misreading of S3 cannot pass for right.
"""

import base64
import contextlib
import hmac
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import obstore
import pytest
from obstore.store import S3Store

from farcast.errors import StoreError
from farcast.store import Store, open_store

SECRET = "SENTINELSECRET"
"""The secret key of every test server: it must turn up in no message, log or record."""


@dataclass(frozen=True)
class Bucket:
    """An S3 bucket on a test server; `options` open it."""

    name: str
    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "testkey",
            "secret_access_key": SECRET,
        }

    def open(self, prefix: str = "", **options: Any) -> Store:
        return open_store(f"s3://{self.name}/{prefix}".rstrip("/"), **{**self.options, **options})


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now. Another program may still take one before it is used."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Seaweed:
    """SeaweedFS with its S3 gateway, data below `folder`. May be killed and started again on
    the same data; `bucket` stays valid."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._config = folder / "s3.json"
        self._config.write_text(json.dumps({"identities": [self._identity()]}))
        self._choose_ports()

    def start(self) -> None:
        """Start; on new ports if another program took one of ours meanwhile."""
        for attempt in range(3):
            with (self._folder / "weed.log").open("ab") as log:
                self._process = subprocess.Popen(
                    self._command(), stdout=log, stderr=log, cwd=self._folder
                )
            try:
                _wait_for_port(self._ports["s3.port"], self._process)
                return
            except RuntimeError:
                self.kill()
                if attempt == 2:
                    raise
                self._choose_ports()

    def kill(self) -> None:
        if self._process is not None:
            _stop(self._process)

    def _choose_ports(self) -> None:
        names = [f"{part}.port" for part in ("master", "volume", "filer", "s3")]
        names += [f"{name}.grpc" for name in names]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.bucket = Bucket("farcast", f"http://127.0.0.1:{self._ports['s3.port']}")

    def _command(self) -> list[str]:
        program = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
        folder = self._folder
        return [
            *(program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-filer", "-s3", f"-s3.config={self._config}", "-master.telemetry=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-volume.max=20", "-master.volumeSizeLimitMB=64"),
            *(f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"),
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]

    @staticmethod
    def _identity() -> dict[str, Any]:
        return {
            "name": "test",
            "credentials": [{"accessKey": "testkey", "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Bucket]:
    """A SeaweedFS that takes writes, with one bucket."""
    with running_seaweed(folder) as server:
        yield server.bucket


@contextlib.contextmanager
def running_seaweed(folder: Path) -> Iterator[Seaweed]:
    server = Seaweed(folder)
    try:
        server.start()
        _make_bucket(server.bucket)
        _wait_for_write(server.bucket)
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def moto() -> Iterator[Bucket]:
    """moto's S3 server: quick, but takes any credentials and bad checksums."""
    (port,) = free_ports(1)
    program = str(Path(sys.executable).with_name("moto_server"))
    process = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    bucket = Bucket("farcast", f"http://127.0.0.1:{port}")
    try:
        _wait_for_port(port, process)
        _make_bucket(bucket)
        yield bucket
    finally:
        _stop(process)


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Callable[[str], Store]]:
    """Azurite, Microsoft's Azure emulator, fetched by npm; yields `open(prefix)`."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run([*install, "azurite@3.35.0"], check=True, timeout=300)
    (port,) = free_ports(1)
    command = [str(folder / "node_modules/.bin/azurite-blob"), "--silent", "--location"]
    command += [str(folder / "data"), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    # The account and key that every Azurite has, printed in its manual.
    account = "devstoreaccount1"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    options = {
        "endpoint": f"http://127.0.0.1:{port}/{account}",
        "account_name": account,
        "account_key": key,
    }
    process = subprocess.Popen([*command, "--skipApiVersionCheck", "--disableTelemetry"])
    try:
        _wait_for_port(port, process)
        _make_container(options, "farcast")
        yield lambda prefix: open_store(f"az://farcast/{prefix}", **options)
    finally:
        _stop(process)


def _make_container(options: dict[str, str], name: str) -> None:
    """One request signed by hand: obstore has no call that makes a container."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    account = options["account_name"]
    signed = [f"{key}:{value}" for key, value in headers.items()]
    lines = ["PUT", *[""] * 11, *signed, f"/{account}/{account}/{name}", "restype:container"]
    key = base64.b64decode(options["account_key"])
    digest = hmac.digest(key, "\n".join(lines).encode(), "sha256")
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
    url = f"{options['endpoint']}/{name}?restype=container"
    with urlopen(Request(url, method="PUT", headers=headers), timeout=30):
        return


def signed_put_url(bucket: Bucket, key: str) -> str:
    """A URL that lets any HTTP client put `key`; "" is the bucket itself."""
    signer = S3Store(
        bucket.name,
        endpoint=bucket.endpoint,
        region="us-east-1",
        access_key_id="testkey",
        secret_access_key=SECRET,
        client_options={"allow_http": True},
    )
    return str(obstore.sign(signer, "PUT", key, timedelta(minutes=1)))


def _make_bucket(bucket: Bucket) -> None:
    with urlopen(Request(signed_put_url(bucket, ""), method="PUT"), timeout=30):
        return


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Nothing it holds is needed any more, and asking politely takes SeaweedFS ten seconds."""
    process.kill()
    process.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError("the server does not listen")


def _wait_for_write(bucket: Bucket) -> None:
    """A volume is made by the first write, which may come too early for it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            bucket.open("started").put("first", b"x")
            return
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
