"""URLs and paths: what opens, what is refused, and what that costs to import."""

import subprocess
import sys
from pathlib import Path

import pytest

import farcast
from farcast.errors import ConfigError
from farcast.store import open_store


def test_paths_and_file_urls_name_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with space"
    monkeypatch.chdir(tmp_path)
    urls = [folder, str(folder), "with space", f"file://{tmp_path}/with%20space"]
    urls.append(f"file://localhost{tmp_path}/with%20space")
    assert {open_store(url).url for url in urls} == {folder.as_uri()}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/with space").url == folder.as_uri()


def test_a_memory_store_is_private_unless_it_has_a_name() -> None:
    first, second = open_store("memory://"), open_store("memory://")
    first.put("k", b"x")
    assert list(second.list("")) == []
    open_store("memory://shared-by-tests").put("k", b"x")
    assert open_store("memory://shared-by-tests").get("k", max_bytes=1) == b"x"


def test_the_public_name_is_the_same_function() -> None:
    assert farcast.open_store is open_store


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "absolute path"),
        ("file://host/data", "absolute path"),
        ("file://data", "absolute path"),
        ("ftp://host/x", "No store is known for 'ftp'"),
        ("s3:/bucket/x", "No store is known for 's3'"),
        ("file:/data", "No store is known for 'file'"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket/../other", "prefix"),
        ("gs://bucket/a//b", "prefix"),
    ],
)
def test_other_urls_are_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match="buckett"):
        open_store("s3://bucket", buckett="x")
    with pytest.raises(ConfigError, match="takes no options"):
        open_store("file:///tmp/x", region="eu")


@pytest.mark.parametrize("host", ["10.0.0.1", "example.com", "[2001:db8::1]"])
def test_plain_http_only_to_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match="https"):
        open_store("s3://bucket", endpoint=f"http://{host}:9000")
    open_store("s3://bucket", endpoint=f"http://{host}:9000", allow_http=True)
    open_store("s3://bucket", endpoint=f"https://{host}:9000")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_loopback_needs_no_permission(host: str) -> None:
    open_store("s3://bucket", endpoint=f"http://{host}:9000")


def test_the_usual_variables_name_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.1:9000")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1"):
        open_store("s3://bucket")
    open_store("s3://bucket", endpoint="https://example.com")


def test_remote_urls_open_without_a_request() -> None:
    assert open_store("s3://bucket/a/b/").url == "s3://bucket/a/b"
    assert open_store("gs://bucket").url == "gs://bucket"
    assert open_store("S3://Bucket/x").url == "s3://Bucket/x"
    azure = open_store("az://box/run", account_name="a", account_key="AAAA")
    assert azure.url == "az://box/run"


def test_local_stores_import_no_client() -> None:
    code = (
        "import sys, farcast.store as s; s.open_store('memory://').put('k', b'');"
        "s.open_store('/tmp/never-made'); sys.exit('obstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
