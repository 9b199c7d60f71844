"""Inference engines that know which verified version they serve.

`TransformersEngine` needs torch, so it is imported from `farcast.engines.transformers_engine`.
"""

from farcast.engines.base import Completion, Engine, FinishReason

__all__ = ["Completion", "Engine", "FinishReason"]
