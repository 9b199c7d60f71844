"""A tiny real model, served through a store, for suites that need an engine."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from farcast.engines.modules import load_module
from farcast.train.models import TINY, prepare_model


@cache
def tiny_folder() -> Path:
    """The folder of the tiny model, made once a test process."""
    return prepare_model(TINY, Path(mkdtemp(prefix="farcast-tiny-")))


def tiny_module() -> Any:
    return load_module(tiny_folder())
