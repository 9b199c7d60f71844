"""Signatures: made over canonical bytes, of one kind of value, by keys that stay in files."""

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from farcast.errors import ConfigError, FormatError, SignatureError
from farcast.fleet.keys import read_signer, read_trusted, write_pair
from farcast.lineage import (
    Manifest,
    ObjectRef,
    RunRecord,
    Signer,
    Timestamp,
    TrustedKey,
    decode_manifest,
    encode_manifest,
    joined,
)
from farcast.types import VersionRef

OBJECT = ObjectRef(digest="1" * 64, size=5)
MANIFEST = Manifest(
    run_id="run1",
    version=3,
    root="a" * 64,
    step=3,
    served_format="bf16",
    tensors=1,
    elements=4,
    bytes_full=8,
    changed=1,
    anchor_version=3,
    anchor=(OBJECT,),
    writer="publisher-1",
    issued=1_700_000_000,
)
RECORD = RunRecord(run_id="run1", created="2026-01-01", assets={"config.json": OBJECT})
TIMESTAMP = Timestamp(run_id="run1", version=3, root="a" * 64, issued=10, expires=20)


@pytest.mark.parametrize("value", [MANIFEST, RECORD, TIMESTAMP], ids=lambda v: type(v).__name__)
def test_what_was_signed_is_believed_and_nothing_else(value: Any) -> None:
    signer, other = Signer.create(), Signer.create()
    signed = signer.sign(value)
    signer.public.check(signed, "key")
    assert signer.sign(value) == signed
    assert signer.sign(signed) == signed
    with pytest.raises(SignatureError, match="not signed, but"):
        signer.public.check(value, "key")
    with pytest.raises(SignatureError, match="not signed by the pinned key"):
        other.public.check(signed, "key")


CHANGES: list[dict[str, Any]] = [
    {"run_id": "run2"},
    {"version": 4},
    {"root": "b" * 64},
    {"step": 9},
    {"served_format": "fp8"},
    {"changed": 2},
    {"anchor_version": 2},
    {"anchor": (ObjectRef(digest="2" * 64, size=5),)},
    {"writer": "publisher-2"},
    {"issued": 1},
    {"issued": msgspec.UNSET},
    {"origin": VersionRef("run0", 1, "a" * 64)},
    {"precision_rule": "decoder"},
    {"also": joined([MANIFEST, replace(MANIFEST, served_format="int8")]).also},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_field_of_a_manifest_is_covered(change: dict[str, Any]) -> None:
    signer = Signer.create()
    altered = replace(signer.sign(MANIFEST), **change)
    with pytest.raises(SignatureError):
        signer.public.check(altered, "key")


def test_every_field_is_among_those_tried() -> None:
    tried = {name for change in CHANGES for name in change}
    fixed = {"format", "signature"}  # one value is allowed; it is what is checked
    counts = {"tensors", "elements", "bytes_full", "deltas"}  # as `changed` and `anchor`
    assert tried | fixed | counts == set(Manifest.__struct_fields__)


def test_a_signature_on_one_kind_of_value_is_none_on_another() -> None:
    signer = Signer.create()
    taken = signer.sign(TIMESTAMP).signature
    with pytest.raises(SignatureError):
        signer.public.check(replace(MANIFEST, signature=taken), "key")


def test_a_signed_manifest_survives_the_wire_and_other_spellings_of_it() -> None:
    signer = Signer.create()
    signed = signer.sign(MANIFEST)
    data = encode_manifest(signed)
    signer.public.check(decode_manifest(data, run_id="run1", version=3), "key")
    spaced = msgspec.json.format(data, indent=4)
    signer.public.check(decode_manifest(spaced, run_id="run1", version=3), "key")
    with pytest.raises(FormatError):
        decode_manifest(data.replace(b'"signature":"', b'"signature":"Z'), run_id="run1", version=3)


def test_signed_bytes_are_fixed() -> None:
    """A reader of another release must find the same bytes signed."""
    signer = Signer.load(SECRET_PEM)
    assert signer.public.fingerprints == ("21fe31dfa154a261",)
    assert signer.sign(TIMESTAMP).signature == GOLDEN


def test_several_keys_are_trusted_while_they_change() -> None:
    old, new = Signer.create(), Signer.create()
    both = TrustedKey.load(old.public.pem + b"comment between\n" + new.public.pem)
    assert both.fingerprints == old.public.fingerprints + new.public.fingerprints
    for signer in (old, new):
        both.check(signer.sign(MANIFEST), "key")
    with pytest.raises(SignatureError):
        both.check(Signer.create().sign(MANIFEST), "key")


# --- files ---------------------------------------------------------------------------------------


def test_a_pair_is_written_once_and_for_its_owner(tmp_path: Path) -> None:
    secret = tmp_path / "run.key"
    public = write_pair(secret)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert read_signer(secret).public.fingerprints == public.fingerprints
    assert read_trusted(tmp_path / "run.key.pub").fingerprints == public.fingerprints
    before = secret.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        write_pair(secret)
    secret.unlink()
    with pytest.raises(ConfigError, match="is there already"):
        write_pair(secret)
    assert not secret.exists()
    assert before


def test_a_secret_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "run.key"
    write_pair(secret)
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_signer(secret)


def test_keys_of_other_programs_are_read() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    signed = Signer.load(pem).sign(MANIFEST)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    TrustedKey.load(public).check(signed, "key")


def _rsa(private: bool) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = ec.generate_private_key(ec.SECP256R1())
    if private:
        return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    ("load", "data"),
    [
        (Signer.load, lambda: b""),
        (Signer.load, lambda: b"-----BEGIN PRIVATE KEY-----\nSENTINELSECRET\n"),
        (Signer.load, lambda: Signer.create().public.pem),
        (Signer.load, lambda: _rsa(private=True)),
        (TrustedKey.load, lambda: b""),
        (TrustedKey.load, lambda: Signer.create().secret_pem),
        (TrustedKey.load, lambda: _rsa(private=False)),
        (TrustedKey.load, lambda: Signer.create().public.pem * 17),
        (
            TrustedKey.load,
            lambda: b"-----BEGIN PUBLIC KEY-----\nSENTINELSECRET\n-----END PUBLIC KEY-----\n",
        ),
    ],
)
def test_what_is_no_key_is_refused_without_repeating_it(
    load: Callable[[bytes], object], data: Callable[[], bytes]
) -> None:
    pem = data()
    with pytest.raises(ConfigError) as refused:
        load(pem)
    assert "SENTINELSECRET" not in str(refused.value)
    assert refused.value.__cause__ is None
    for line in pem.splitlines():
        assert len(line) < 30 or line.decode() not in str(refused.value)


def test_a_secret_is_in_no_repr() -> None:
    signer = Signer.create()
    text = signer.secret_pem.decode().splitlines()[1]
    assert text not in repr(signer) + repr(signer.public) + str(signer)


def test_without_the_library_one_sentence_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from farcast.errors import MissingDependencyError\n"
        "from farcast.lineage import Signer\n"
        "try:\n    Signer.create()\n"
        "except MissingDependencyError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert "farcast[sign]" in done.stdout, done.stderr


SECRET_PEM = b"""-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g
-----END PRIVATE KEY-----
"""
"""The first test key of RFC 8032; nobody may use it for anything."""

GOLDEN = (
    "fc0af0115eb0284b1cc04fe866d98227fe09548980854111aea1cd904d35a373"
    "15620a4b31230fd8d99ff3eb9021bda046881a65cbe24ea91794df3b7c65ea0d"
)
