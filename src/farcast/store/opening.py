"""From a URL to a store. Backends are imported when they are asked for.

    file:///data/run1, /data/run1    a folder
    memory://, memory://name         this process; a named one is the same store every time
    s3://bucket/prefix               S3 and what speaks its protocol
    gs://bucket/prefix               Google Cloud Storage
    az://container/prefix            Azure Blob Storage

Refuses credentials in a URL: they would end in logs. They come from the environment or from
options.
"""

import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from farcast.errors import ConfigError
from farcast.store.base import Store
from farcast.store.memory import MemoryStore

SCHEMES = ("file", "memory", "s3", "gs", "az")

_ALMOST_URL = re.compile(r"[A-Za-z][A-Za-z0-9+-]+:")
"""`s3:/bucket` or `file:/data` is a slip of the pen, not the name of a folder."""

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def open_store(url: str | Path, **options: Any) -> Store:
    """Open the store at `url`; nothing is read or written yet.

    Options for s3, gs and az are listed at `farcast.store.options.RemoteOptions`; file and
    memory take none. Raises `ConfigError` for a URL or an option it does not know.
    """
    scheme, rest = _split(url)
    if scheme in ("file", "memory"):
        if options:
            raise ConfigError(
                f"A {scheme} store takes no options, not {', '.join(sorted(options))}; remove them."
            )
        return _open_folder(rest) if scheme == "file" else _open_memory(rest)
    from farcast.store.options import open_remote

    return open_remote(scheme, rest, options)


def _split(url: str | Path) -> tuple[str, str]:
    text = str(url)
    scheme, separator, rest = text.partition("://")
    if not separator and not (isinstance(url, str) and _ALMOST_URL.match(text)):
        return "file", str(Path(text).expanduser().absolute()) if text else ""
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        raise ConfigError(
            f"No store is known for {scheme.partition(':')[0][:20]!r}; use a folder's path or one "
            f"of {', '.join(f'{name}://' for name in SCHEMES)}."
        )
    if scheme == "file":
        return scheme, unquote(rest.removeprefix("localhost"))
    if any(mark in rest for mark in "@?#"):
        raise ConfigError(
            f"The {scheme}:// URL holds a user, a query or a fragment; write only bucket and "
            "prefix, and give credentials by the environment or by options."
        )
    return scheme, rest


def _open_folder(path: str) -> Store:
    from farcast.store.local import FileStore

    if not path.startswith("/") or "\0" in path:
        raise ConfigError("A file store needs an absolute path, like file:///data/run1.")
    return FileStore(Path(path))


def _open_memory(name: str) -> Store:
    if not name:
        return MemoryStore()
    with _named_lock:
        return _named.setdefault(name, MemoryStore(name))
