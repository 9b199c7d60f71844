"""Ed25519 signatures on manifests, run records and timestamps. Pure: keys and values in and out.

Signed is the canonical JSON of a value without its signature, after a line that says what kind of
value it is: a signature on one kind is never good for another. The bytes are made anew from the
value that was decoded, so what is verified is what is used, however the JSON was written.

Keys are PEM, as `openssl genpkey -algorithm ed25519` writes them. A trusted file may hold several
public keys, any of which will do, so that keys can be changed without a moment of distrust.

Refuses other algorithms (nothing to negotiate, so nothing to talk down), secret keys where public
ones belong, and to say anything of a secret in a message or a `repr`.
"""

import hashlib
import re
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from farcast.errors import ConfigError, MissingDependencyError, SignatureError
from farcast.lineage.manifest import Manifest, RunRecord, Timestamp

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

MAX_TRUSTED_KEYS = 16
"""An old key, a new one, and room for the careful; each is tried in turn."""

MAX_PEM_BYTES = 1 << 16

_Signable = TypeVar("_Signable", Manifest, RunRecord, Timestamp)

_KINDS = {Manifest: b"manifest", RunRecord: b"run", Timestamp: b"timestamp"}

_PUBLIC = re.compile(
    rb"-----BEGIN PUBLIC KEY-----[^-]{1,4096}-----END PUBLIC KEY-----", re.ASCII | re.DOTALL
)


class TrustedKey:
    """The public keys that a reader believes. Anything signed by one of them is believed."""

    __slots__ = ("_keys",)

    def __init__(self, keys: "tuple[Ed25519PublicKey, ...]") -> None:
        self._keys = keys

    @classmethod
    def load(cls, pem: bytes) -> "TrustedKey":
        """Read PEM that holds one or several public keys."""
        _require_library()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        if b"PRIVATE KEY" in pem:
            raise ConfigError(
                "This is a secret key; replicas get the public one (`farcast keygen` wrote both)."
            )
        blocks = _PUBLIC.findall(pem[:MAX_PEM_BYTES])
        if not 1 <= len(blocks) <= MAX_TRUSTED_KEYS:
            raise ConfigError(
                f"A trusted key is PEM with 1 to {MAX_TRUSTED_KEYS} public keys, and this has "
                f"{len(blocks)}; make one with `farcast keygen`."
            )
        keys: list[Ed25519PublicKey] = []
        for block in blocks:
            try:
                key = load_pem_public_key(block)
            except (ValueError, UnsupportedAlgorithm):
                raise ConfigError(_NOT_ED25519) from None
            if not isinstance(key, Ed25519PublicKey):
                raise ConfigError(_NOT_ED25519)
            keys.append(key)
        return cls(tuple(keys))

    @property
    def pem(self) -> bytes:
        """The keys as text that `load` reads."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return b"".join(
            key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for key in self._keys
        )

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """A short name for each key, for people to compare."""
        return tuple(hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16] for key in self._keys)

    def __repr__(self) -> str:
        return f"TrustedKey({', '.join(self.fingerprints)})"

    def check(self, value: Manifest | RunRecord | Timestamp, key: str) -> None:
        """Raise `SignatureError` unless one of the keys signed `value`, found under `key`."""
        if value.signature is UNSET:
            raise SignatureError(
                f"{key} is not signed, but a key is pinned ({', '.join(self.fingerprints)}); "
                "do not use it: let the trainer sign, or ask who else writes to this store."
            )
        if not any(_fits(public, value) for public in self._keys):
            raise SignatureError(
                f"{key} is not signed by the pinned key ({', '.join(self.fingerprints)}); "
                "do not use it: compare the key with the trainer's, or ask who else writes to "
                "this store."
            )


class Signer:
    """The trainer's secret key."""

    __slots__ = ("_key",)

    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key

    @classmethod
    def create(cls) -> "Signer":
        """A new key from the system's source of randomness."""
        _require_library()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, pem: bytes) -> "Signer":
        """Read an unencrypted PKCS #8 PEM."""
        _require_library()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(pem[:MAX_PEM_BYTES], password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            # From None: the library's words could hold a piece of what it read.
            raise ConfigError(
                "The signing key is no unencrypted Ed25519 key in PEM; make one with "
                "`farcast keygen`."
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(_NOT_ED25519)
        return cls(key)

    @property
    def secret_pem(self) -> bytes:
        """The key as text that `load` reads: to be written to a file that only its owner reads."""
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public(self) -> TrustedKey:
        """What readers pin."""
        return TrustedKey((self._key.public_key(),))

    def __repr__(self) -> str:
        return f"Signer({', '.join(self.public.fingerprints)})"

    def sign(self, value: _Signable) -> _Signable:
        """`value` with its signature; equal values get equal ones."""
        return replace(value, signature=self._key.sign(_signed_bytes(value)).hex())


_NOT_ED25519 = "The key is not an Ed25519 key; make one with `farcast keygen`."


def _signed_bytes(value: Manifest | RunRecord | Timestamp) -> bytes:
    bare = replace(value, signature=UNSET)
    text = msgspec.json.encode(bare, order="deterministic")
    return b"farcast " + _KINDS[type(value)] + b" 1\n" + text


def _fits(public: "Ed25519PublicKey", value: Manifest | RunRecord | Timestamp) -> bool:
    from cryptography.exceptions import InvalidSignature

    if value.signature is UNSET:
        return False
    try:
        public.verify(bytes.fromhex(value.signature), _signed_bytes(value))
    except InvalidSignature:
        return False
    return True


def _require_library() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "Signatures need the library `cryptography`; install farcast[sign]."
        ) from None
