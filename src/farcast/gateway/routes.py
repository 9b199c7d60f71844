"""What may pass to an engine: a list of what is allowed, compared byte for byte.

A list of what is forbidden would let through whatever an engine gains next, or a path that is
spelt in another way. What is not here does not exist for a client: routes that change weights,
run code, stop the engine, or abort the requests of others.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

EngineKind = Literal["vllm", "sglang", "http"]


class Route(NamedTuple):
    """`generates`: the gate stands before it. `tells_spans`: the engine's answer says which
    weights wrote which tokens. `salt`: the field that keeps cached prefixes apart."""

    method: str
    path: str
    generates: bool = False
    tells_spans: bool = False
    salt: str | None = None


Table = Mapping[tuple[str, str], Route]


def _table(*routes: Route) -> Table:
    return {(route.method, route.path): route for route in routes}


def _generate(path: str, salt: str | None, *, tells_spans: bool = False) -> Route:
    return Route("POST", path, generates=True, tells_spans=tells_spans, salt=salt)


_MODELS = Route("GET", "/v1/models")
_TOKENS = (Route("POST", "/tokenize"), Route("POST", "/detokenize"))

ROUTES: Mapping[EngineKind, Table] = {
    "vllm": _table(
        _MODELS,
        Route("GET", "/version"),
        *_TOKENS,
        _generate("/v1/completions", "cache_salt"),
        _generate("/v1/chat/completions", "cache_salt"),
        # Present if the engine was started with --enable-scale-out.
        _generate("/inference/v1/generate", "cache_salt", tells_spans=True),
        Route("POST", "/v1/completions/render"),
        Route("POST", "/v1/chat/completions/render"),
        Route("POST", "/v1/completions/derender"),
        Route("POST", "/v1/chat/completions/derender"),
    ),
    "sglang": _table(
        _MODELS,
        *_TOKENS,
        _generate("/v1/completions", "extra_key"),
        _generate("/v1/chat/completions", "extra_key"),
        _generate("/generate", "extra_key"),
    ),
    "http": _table(
        _MODELS,
        _generate("/v1/completions", "cache_salt"),
        _generate("/v1/chat/completions", "cache_salt"),
        _generate("/generate", "cache_salt", tells_spans=True),
    ),
}

EVERY_ROUTE: Table = {key: route for table in ROUTES.values() for key, route in table.items()}
"""For the gateway, whose replicas may be of several kinds; each keeps its own list."""
