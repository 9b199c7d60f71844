"""Whether what serving needs is installed."""

from importlib.util import find_spec

from farcast.errors import MissingDependencyError

_NEEDED = ("aiohttp", "uvloop", "prometheus_client")


def require_serving(*more: str) -> None:
    """Raise `MissingDependencyError` unless the extra `serve`, and `more`, is there."""
    missing = [name for name in (*_NEEDED, *more) if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"Serving needs {', '.join(missing)}; install it with `pip install 'farcast[serve]'`."
        )
