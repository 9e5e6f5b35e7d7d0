"""``route_topk``: router logits to expert numbers and weights."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx

from ..kernels import cpu
from ..policy import DEFAULT, Policy
from ..routes import count_fast, count_stock


def reference(
    logits: mx.array, top_k: int, normalise: bool = True, numerics: str = "precise"
) -> tuple[mx.array, mx.array]:
    """The meaning in MLX operations; ``match`` is what mlx-lm computes."""
    if numerics == "match":
        gates = mx.softmax(logits, axis=-1, precise=True)
        ids = mx.argpartition(gates, kth=-top_k, axis=-1)[..., -top_k:]
        ids = mx.stop_gradient(ids)
        scores = mx.take_along_axis(gates, ids, axis=-1)
        if normalise:
            scores = scores / scores.sum(axis=-1, keepdims=True)
        return ids, scores
    gates = mx.softmax(logits.astype(mx.float32), axis=-1)
    # A NaN logit ranks below every number, so ids stay valid and distinct.
    rank = mx.where(mx.isnan(logits), -mx.inf, logits.astype(mx.float32))
    # argsort is stable: of equal logits the highest index stands last, and wins.
    ids = mx.stop_gradient(mx.argsort(rank, axis=-1)[..., ::-1][..., :top_k])
    scores = mx.take_along_axis(gates, ids, axis=-1)
    if normalise:
        scores = scores / scores.sum(axis=-1, keepdims=True)
    return ids.astype(mx.uint32), scores


def supported(logits: mx.array, top_k: int, policy: Policy = DEFAULT) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("route_topk", policy)


def route_topk(
    logits: mx.array, top_k: int, normalise: bool = True, policy: Policy = DEFAULT
) -> tuple[mx.array, mx.array]:
    """The ``top_k`` experts of each row and their weights.

    Args:
        logits: (..., E), float.
        top_k: experts a row, 1 to E.
        normalise: divide the chosen softmax weights by their sum.

    Returns:
        ids (..., top_k) uint32 and scores (..., top_k): float32, largest first
        (the stock path: mlx-lm's order and dtype). Of equal logits the highest
        index wins.

    Raises:
        ValueError: ``top_k`` is not between 1 and the number of experts.

    Source: mlx_lm.models.qwen3_next.Qwen3NextSparseMoeBlock.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(
            f"route_topk: top_k is {top_k}, supported are 1 to {logits.shape[-1]}"
        )
    reason = supported(logits, top_k, policy)
    if reason is None:
        count_fast("route_topk", "cpu")
        return cpu.route_topk(logits, top_k, normalise)
    count_stock("route_topk", reason)
    return reference(logits, top_k, normalise, numerics="match")
