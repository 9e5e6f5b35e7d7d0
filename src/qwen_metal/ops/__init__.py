"""The operations of a Qwen hybrid MoE decoder, one file each.

Every file holds the contract (shapes, dtypes, units, errors), a
``reference()`` in plain MLX operations that defines the meaning, a
``supported()`` predicate that answers ``None`` or the reason why no fast route
can serve the call, and the public function that dispatches and counts.

``reference(..., numerics="precise")`` keeps float32 to the operation's output;
``reference(..., numerics="match")`` rounds wherever mlx-lm rounds and is bit
for bit what mlx-lm computes: it is the path that serves a call no fast route
supports.
"""

from . import (
    attention_prefill,
    attention_prepare,
    embed,
    gated_delta_chunk,
    gated_delta_prepare,
    gated_delta_scan,
    gated_delta_step,
    gated_norm,
    gqa_decode,
    grouped_qmm,
    kv_append,
    moe_decode,
    projections,
    route_plan,
    route_topk,
)

#: Every operation, in the order in which a decoder layer meets them.
NAMES = (
    "embed",
    "projections",
    "gated_delta_prepare",
    "gated_delta_scan",
    "gated_delta_chunk",
    "gated_delta_step",
    "gated_norm",
    "attention_prepare",
    "kv_append",
    "gqa_decode",
    "attention_prefill",
    "route_topk",
    "route_plan",
    "grouped_qmm",
    "moe_decode",
)

__all__ = ["NAMES", *NAMES]
