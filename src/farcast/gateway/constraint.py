"""What version a request asks for: read from its body's field, or from a header. Pure.

    body     {"weight_version": {"min_version": 12}}      or {"exact_version": 12}
    header   X-Farcast-Weight-Version: min=12             or exact=12

Refuses anything that could be read in two ways: a request that says both `min` and `exact`, or
one thing in the body and another in the header.
"""

import re

import msgspec

from farcast.engines.admission import ANY, Constraint
from farcast.errors import ConfigError
from farcast.types import MAX_VERSION

FIELD = "weight_version"
HEADER = "X-Farcast-Weight-Version"
_HEADER_FORM = re.compile(r"\s*(min|exact)\s*=\s*(\d{1,12})\s*")


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_version: int | None = None
    exact_version: int | None = None


_DECODER = msgspec.json.Decoder(_Wire | None)


def constraint_of(field: msgspec.Raw | None, header: str | None) -> Constraint:
    """The constraint of a request; raises `ConfigError` if it isn't clear."""
    in_body = ANY if field is None else _from_body(field)
    if header is None:
        return in_body
    in_header = _from_header(header)
    if field is not None and in_body not in (ANY, in_header):
        raise ConfigError(
            f"The body's {FIELD} and the header {HEADER} ask for different versions; send one."
        )
    return in_header


def as_header(constraint: Constraint) -> str | None:
    """The same as a header, None if any version will do."""
    if constraint.exact_version is not None:
        return f"exact={constraint.exact_version}"
    if constraint.min_version is not None:
        return f"min={constraint.min_version}"
    return None


def _from_body(field: msgspec.Raw) -> Constraint:
    try:
        wire = _DECODER.decode(field)
    except msgspec.DecodeError as error:
        raise _unclear(str(error)) from error
    if wire is None:
        return ANY
    if wire.min_version is not None and wire.exact_version is not None:
        raise _unclear("it has both")
    for version in (wire.min_version, wire.exact_version):
        if version is not None and not 0 <= version <= MAX_VERSION:
            raise _unclear(f"versions are 0 to {MAX_VERSION}")
    return Constraint(wire.min_version, wire.exact_version)


def _from_header(header: str) -> Constraint:
    match = _HEADER_FORM.fullmatch(header)
    if match is None:
        raise ConfigError(f"The header {HEADER} is not understood; write min=12 or exact=12.")
    version = int(match[2])
    return Constraint(min_version=version) if match[1] == "min" else Constraint(None, version)


def _unclear(why: str) -> ConfigError:
    return ConfigError(
        f'The field {FIELD} is not understood ({why}); write {{"min_version": 12}} or '
        '{"exact_version": 12}.'
    )
