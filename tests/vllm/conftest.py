"""The vLLM environment and one server for a module; without the environment it is skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_world import VllmWorld, environment_python

ABSENT = "the vLLM environment is not built: make vllm-env"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("vllm"))
            item.add_marker(pytest.mark.timeout(600))
            if environment_python() is None:
                item.add_marker(pytest.mark.skip(reason=ABSENT))


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmWorld]:
    """A run with the real model, and a server that was started with its version 0."""
    with VllmWorld.started(tmp_path_factory.mktemp("vllm")) as world:
        yield world
