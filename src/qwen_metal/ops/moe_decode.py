"""``moe_decode``: the experts of 1 to 8 rows: gate, up, SwiGLU; down, scores, shared."""

from __future__ import annotations

from typing import NamedTuple, Optional

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy
from .matrix import Matrix, Norm, check_columns, check_float, gather_matmul, matmul, rms_norm

#: Most rows one call serves; more are a prefill (``grouped_qmm``).
MAX_ROWS = 8


class Experts(NamedTuple):
    """The routed experts: gate and up (E, F, K), down (E, K, F)."""

    gate: Matrix
    up: Matrix
    down: Matrix


class Shared(NamedTuple):
    """The shared expert, its first stage done by ``projections``.

    gate_logit: (R, 1), before the sigmoid, or None for an ungated expert.
    gate, up: (R, Fs), before SwiGLU. down: (K, Fs).
    """

    gate_logit: Optional[mx.array]
    gate: mx.array
    up: mx.array
    down: Matrix


def reference_shared(shared: Shared, numerics: str = "precise") -> mx.array:
    """Output of the shared expert (R, K): sigmoid(logit) * down(silu(gate) * up)."""
    if numerics == "match":
        y = matmul(swiglu(shared.gate, shared.up), shared.down, numerics)
        return y if shared.gate_logit is None else mx.sigmoid(shared.gate_logit) * y
    gate, up = shared.gate.astype(mx.float32), shared.up.astype(mx.float32)
    y = matmul(gate * mx.sigmoid(gate) * up, shared.down, numerics)
    if shared.gate_logit is None:
        return y
    return mx.sigmoid(shared.gate_logit.astype(mx.float32)) * y


def reference(
    x: mx.array,
    experts: Experts,
    ids: mx.array,
    scores: mx.array,
    norm: Optional[Norm] = None,
    shared: Optional[Shared] = None,
    residual: Optional[mx.array] = None,
    numerics: str = "precise",
) -> mx.array:
    """The meaning in MLX operations; ``match`` is what mlx-lm computes."""
    h = rms_norm(x, norm, numerics)[..., None, None, :]
    up = gather_matmul(h, experts.up, ids, numerics)
    gate = gather_matmul(h, experts.gate, ids, numerics)
    act = swiglu(gate, up) if numerics == "match" else gate * mx.sigmoid(gate) * up
    y = gather_matmul(act, experts.down, ids, numerics).squeeze(-2)
    y = (y * scores[..., None]).sum(axis=-2)
    if shared is not None:
        y = y + reference_shared(shared, numerics)
    if residual is not None:
        y = residual + y
    return y.astype(x.dtype)


def supported(
    x: mx.array,
    experts: Experts,
    ids: mx.array,
    scores: mx.array,
    norm: Optional[Norm] = None,
    shared: Optional[Shared] = None,
    residual: Optional[mx.array] = None,
    policy: Policy = DEFAULT,
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("moe_decode", policy)


def moe_decode(
    x: mx.array,
    experts: Experts,
    ids: mx.array,
    scores: mx.array,
    norm: Optional[Norm] = None,
    shared: Optional[Shared] = None,
    residual: Optional[mx.array] = None,
    policy: Policy = DEFAULT,
) -> mx.array:
    """``residual + sum_k scores_k * down_k(silu(gate_k h) * up_k h) + shared``.

    Args:
        x: rows (R, K), R from 1 to 8, float; h is x normalised by ``norm``.
        experts: gate, up and down of all E experts, any format each.
        ids: (R, top_k) expert numbers, from ``route_topk``.
        scores: (R, top_k), float.
        norm: RMSNorm folded in, or None where x is normalised already.
        shared: first stage of the shared expert, or None.
        residual: (R, K) or None.

    Returns:
        (R, K) in the dtype of ``x``. The activation between the two stages is
        float32 (the stock path: the dtype of ``x``).

    Raises:
        ValueError: shapes that do not fit, x not float, or over 8 rows.

    Source: mlx_lm.models.qwen3_next.Qwen3NextSparseMoeBlock.
    """
    check_float("moe_decode", "x", x)
    check_columns("moe_decode", x, experts.gate)
    if x.ndim != 2 or x.shape[0] > MAX_ROWS or ids.shape != scores.shape:
        raise ValueError(
            f"moe_decode: x is {x.shape}, ids {ids.shape}, scores {scores.shape}; "
            f"supported are (R, K), (R, top_k), (R, top_k) with R up to {MAX_ROWS}"
        )
    reason = supported(x, experts, ids, scores, norm, shared, residual, policy)
    if reason is None:
        routes.fast("moe_decode", "cpu")
        return cpu.moe_decode(x, experts, ids, scores, norm, shared, residual)
    routes.stock("moe_decode", reason)
    return reference(x, experts, ids, scores, norm, shared, residual, numerics="match")
