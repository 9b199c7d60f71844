"""Asks a recorder. One request, no session."""

import urllib.error
import urllib.request
from collections.abc import Mapping

import msgspec

from farcast.errors import ConfigError, EngineUnreachableError

TIMEOUT = 60.0
MAX_ANSWER = 1 << 20


class _Answer(msgspec.Struct):
    trajectories: list[str]


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


def post_outcome(url: str, authorization: str, outcome: Mapping[str, object]) -> list[str]:
    """The ids of the trajectories that went home; `ConfigError` has the recorder's words."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url[:80]!r} is no http address; name the recorder's.")
    request = urllib.request.Request(
        url.rstrip("/") + "/farcast/outcome",
        data=msgspec.json.encode(outcome),
        headers={"Authorization": authorization, "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            read = msgspec.json.decode(answer.read(MAX_ANSWER), type=_Answer)
            return read.trajectories
    except urllib.error.HTTPError as error:
        raise ConfigError(f"The recorder refused: {_words(error.read(MAX_ANSWER))}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise EngineUnreachableError(
            f"No recorder answers at {url[:80]} ({type(error).__name__}); start `farcast record "
            "serve`, or name its address with --url."
        ) from error


def _words(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        return "it said nothing more."
