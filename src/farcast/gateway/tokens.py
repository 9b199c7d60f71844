"""The bearer token that a listener asks for.

Read from a file or from an environment variable that an option names, never from the command
line, where other users of the machine can read it. Compared in constant time, and in no message.
"""

import hmac
import os
from pathlib import Path

from farcast.errors import ConfigError

SHORTEST = 16
_SCHEME = b"bearer "


class Token:
    """A secret that a request has to carry as `Authorization: Bearer ...`."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        if len(secret) < SHORTEST or not secret.isascii() or not secret.isprintable():
            raise ConfigError(
                f"A token is at least {SHORTEST} plain characters; make one with "
                "`python -c 'import secrets; print(secrets.token_urlsafe())'`."
            )
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "Token(...)"

    def allows(self, authorization: str | None) -> bool:
        """Whether a request with this header may pass."""
        given = (authorization or "").encode("utf-8", "surrogateescape")
        scheme, secret = given[: len(_SCHEME)].lower(), given[len(_SCHEME) :].strip()
        return hmac.compare_digest(secret, self._secret) and scheme == _SCHEME

    def header(self) -> str:
        """What a client of ours sends."""
        return f"Bearer {self._secret.decode()}"


def read_token(file: Path | None, variable: str | None, *, what: str = "token") -> Token:
    """The token that the options name; raises `ConfigError` if they name none, or two."""
    option = what.replace(" ", "-")
    if (file is None) == (variable is None):
        raise ConfigError(
            f"Name the {what} either with --{option}-file FILE or with --{option}-env VARIABLE."
        )
    if file is not None:
        try:
            secret = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The {what} cannot be read from {file} ({type(error).__name__}); "
                "name a readable text file."
            ) from error
        return Token(secret)
    return Token(read_secret(variable or ""))


def read_secret(variable: str) -> str:
    """What an environment variable holds; raises `ConfigError` if that is nothing."""
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ConfigError(f"The environment variable {variable} is empty; put the secret there.")
    return secret
