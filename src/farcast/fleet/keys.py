"""Key files: written once, read bounded.

Refuses to overwrite a key, to take a secret one that everybody on the machine may read, and to
take any key but from a file: arguments and environments end up in process lists and logs.
"""

import os
from pathlib import Path

from farcast.errors import ConfigError
from farcast.lineage.signing import MAX_PEM_BYTES, Signer, TrustedKey

PUBLIC_SUFFIX = ".pub"

_OTHERS = 0o007


def write_pair(secret: Path) -> TrustedKey:
    """Write a new secret key to `secret`, readable by its owner alone, and the public one beside
    it, with `.pub` added to the name. Both are new files or neither is."""
    public = secret.with_name(secret.name + PUBLIC_SUFFIX)
    for path in (secret, public):
        if path.exists() or path.is_symlink():
            raise ConfigError(
                f"{path} is there already, and a key that is overwritten is lost; name another "
                "file, or remove it first."
            )
    signer = Signer.create()
    _create(secret, signer.secret_pem, 0o600)
    try:
        _create(public, signer.public.pem, 0o644)
    except BaseException:
        secret.unlink()
        raise
    return signer.public


def read_signer(path: Path) -> Signer:
    """The secret key in a file."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & _OTHERS:
            raise ConfigError(
                f"The signing key {path} may be read by everybody on this machine; say "
                f"`chmod 600 {path}`, and make a new key if others may have seen it."
            )
        return Signer.load(file.read(MAX_PEM_BYTES + 1))


def read_trusted(path: Path) -> TrustedKey:
    """The public keys in a file."""
    with path.open("rb") as file:
        return TrustedKey.load(file.read(MAX_PEM_BYTES + 1))


def _create(path: Path, data: bytes, mode: int) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(opened, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
