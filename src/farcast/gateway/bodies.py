"""What is changed in the bodies that pass: one field in, one field out. Pure.

A request's fields are split without being read, so their bytes reach the engine as they were.
Splitting, unlike looking for a substring, can't be fooled by escapes or by a field given twice:
the last one counts, as everywhere, and only that one goes on. An answer is not parsed at all
unless a commit fell into it.
"""

from collections.abc import Mapping

import msgspec

from farcast.errors import ConfigError

Fields = dict[str, msgspec.Raw]

MAX_SALT = 1024
"""What vLLM takes as `cache_salt`."""

_FIELDS = msgspec.json.Decoder(Fields)
_SALT = msgspec.json.Decoder(str | list[str] | None)
_ENCODER = msgspec.json.Encoder()


def split(body: bytes) -> Fields:
    """The fields of a JSON object; raises `ConfigError` if it is none."""
    try:
        return _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"The body is not a JSON object ({error}); correct it.") from error


def join(fields: Mapping[str, msgspec.Raw]) -> bytes:
    return _ENCODER.encode(fields)


def salted(fields: Fields, name: str, salt: str) -> None:
    """Put `salt` into the field that keeps cached prefixes apart, before the client's own."""
    own = fields.get(name)
    try:
        value = None if own is None else _SALT.decode(own)
    except msgspec.DecodeError as error:
        raise ConfigError(f"The field {name} has to be text; correct it.") from error
    if isinstance(value, list):
        mixed: str | list[str] = [f"{salt}:{each}" for each in value]
    else:
        mixed = f"{salt}:{value}" if value else salt
    if any(len(each) > MAX_SALT for each in ([mixed] if isinstance(mixed, str) else mixed)):
        raise ConfigError(f"The field {name} is too long; keep it below 900 characters.")
    fields[name] = msgspec.Raw(_ENCODER.encode(mixed))


def with_field(answer: bytes, name: str, value: bytes) -> bytes:
    """The JSON object `answer` with one more field; as it is if it is no object."""
    end = answer.rstrip()
    if not end.endswith(b"}") or not end.startswith(b"{"):
        return answer
    comma = b"" if end[1:-1].strip() == b"" else b","
    return b'%b%b"%b":%b}' % (end[:-1], comma, name.encode(), value)
