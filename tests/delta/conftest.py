"""Every test here runs the codings of large models on small tensors, in blocks of 128 words."""

from collections.abc import Iterator

import pytest

from farcast.delta import blocks, writing


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as change:
        change.setattr(writing, "SMALL_WORDS", 0)
        change.setattr(blocks, "BLOCK_WORDS", 128)
        yield
