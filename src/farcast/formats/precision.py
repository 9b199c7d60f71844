"""Which tensors are quantised and which stay in high precision, by name. Pure.

A rule names what *is* quantised, so that a tensor nobody thought of stays exact: embeddings, the
output head, norms, routers and their biases, convolutions and position tables stay in bf16, and
so does a matrix whose columns the format's groups do not divide. The rule's name stands in the
manifest.

Engines fuse some matrices into one (q, k, v; gate, up). Where a format has one scale for a whole
tensor, those that are fused share it, because the engine can keep only one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_RULE = "decoder"


@dataclass(frozen=True)
class PrecisionRule:
    """`pattern` matches the module path of each quantised matrix; `keeps` says in words what
    stays in high precision."""

    name: str
    pattern: re.Pattern[str]
    keeps: str


_ATTENTION = (
    r"(?:self_attn|attn|attention)\."
    r"(?:[qkvo]_proj|qkv_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)"
)
_MLP = (
    r"(?:mlp|feed_forward|block_sparse_moe)\.(?:experts\.\d+\.|shared_experts?\.)?"
    r"(?:gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)"
)


def _rule(name: str, body: str, keeps: str) -> PrecisionRule:
    return PrecisionRule(name, re.compile(rf"(?:.*\.)?layers\.\d+\.(?:{body})"), keeps)


RULES: Mapping[str, PrecisionRule] = {
    rule.name: rule
    for rule in (
        _rule(
            "decoder",
            f"{_ATTENTION}|{_MLP}",
            "embeddings, output head, norms, biases, routers, everything outside the layers",
        ),
        _rule("mlp", _MLP, "as decoder, and attention"),
        _rule(
            "experts",
            r"(?:mlp|block_sparse_moe)\.experts\.\d+\.(?:gate_proj|up_proj|down_proj|w1|w2|w3)",
            "as decoder, and attention, shared experts and dense layers",
        ),
    )
}

_FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "w1": "gate_up",
    "w3": "gate_up",
    "q_a_proj": "qkv_a",
    "kv_a_proj_with_mqa": "qkv_a",
}

_WEIGHT = ".weight"


def quantised_module(name: str, shape: tuple[int, ...], rule: str, group: int | None) -> str | None:
    """The module path of a matrix that `rule` quantises in groups of `group` columns (None: any
    number will do); None for a tensor that stays in high precision."""
    if len(shape) != 2 or 0 in shape or not name.endswith(_WEIGHT):
        return None
    if group is not None and shape[1] % group:
        return None
    module = name.removesuffix(_WEIGHT)
    return module if RULES[rule].pattern.fullmatch(module) else None


def fused_with(module: str) -> str:
    """The same for all modules that engines fuse with this one."""
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{_FUSED.get(leaf, leaf)}"
