"""vLLM's own way of changing weights, used to commit what the worker extension has staged.

init_weight_transfer_engine   nothing: attaching goes over the worker extension, which answers
start_weight_update           nothing
update_weights {"label": L}   writes the words staged under L, reads them back
finish_weight_update          nothing: vLLM takes the new name of the version
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from farcast.engines.vllm_plugin.residents import resident_of


@dataclass
class NoInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """Nothing has to be set up."""


@dataclass
class CommitInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which staged version to write."""

    label: str


class FarcastTransfer(WeightTransferEngine[NoInfo, CommitInfo]):  # type: ignore[misc]
    """Commits in place. Draft models are not updated."""

    init_info_cls = NoInfo
    update_info_cls = CommitInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: words are overwritten where they are."""

    def receive_weights(self, update_info: CommitInfo, *_: Any) -> None:
        resident_of(self.model).write(update_info.label)

    def finish_weight_update(self) -> None:
        """Nothing to finish: what was written is in use at once."""

    def shutdown(self) -> None:
        """Nothing is held open."""
