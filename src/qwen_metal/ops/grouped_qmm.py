"""``grouped_qmm``: grouped quantised GEMM over a plan; ``gather_sum`` after it."""

from __future__ import annotations

from typing import Optional, Sequence

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from ..kernels import cpu
from ..policy import DEFAULT, Policy
from ..routes import count_fast, count_stock
from .matrix import Matrix, check_columns, check_float, gather_matmul
from .route_plan import Plan


def reference(
    x: mx.array,
    matrices: Sequence[Matrix],
    plan: Plan,
    scores: Optional[mx.array] = None,
    numerics: str = "precise",
) -> mx.array:
    """The meaning in MLX operations; ``match`` rounds as mlx-lm's SwitchGLU."""
    # Rows of the tokens are gathered; rows that are sorted already stay. With one expert a row both
    # have one size, and gate and up take the tokens'.
    gathered = x.shape[0] != plan.order.size or (plan.top_k == 1 and len(matrices) == 2)
    rows = x[plan.order // plan.top_k] if gathered else x
    rows = rows[:, None]
    ys = [gather_matmul(rows, m, plan.experts, numerics, True)[:, 0] for m in matrices]
    if len(ys) == 2:
        if numerics == "match":
            return swiglu(*ys)
        return ys[0] * mx.sigmoid(ys[0]) * ys[1]
    if scores is None:
        return ys[0]
    return ys[0] * scores.reshape(-1)[plan.order][:, None]


def reference_gather_sum(
    y: mx.array,
    plan: Plan,
    shared: Optional[mx.array] = None,
    residual: Optional[mx.array] = None,
    dtype: Optional[mx.Dtype] = None,
) -> mx.array:
    """The meaning in MLX operations: a token's rows in the order of its experts."""
    total = y[plan.inverse].reshape(-1, plan.top_k, y.shape[-1]).sum(axis=-2)
    if shared is not None:
        total = total + shared
    if residual is not None:
        total = residual + total
    return total.astype(dtype) if dtype else total


def supported(
    x: mx.array, matrices: Sequence[Matrix], plan: Plan, policy: Policy = DEFAULT
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("grouped_qmm", policy)


def grouped_qmm(
    x: mx.array,
    matrices: Sequence[Matrix],
    plan: Plan,
    scores: Optional[mx.array] = None,
    policy: Policy = DEFAULT,
) -> mx.array:
    """Each pair of the plan through its expert, with one of two epilogues.

    Args:
        x: rows of the tokens (R, K), gathered by the plan, or rows in sorted
            order already (P, K); float. With ``top_k`` 1, where both have one
            size, (gate, up) take the tokens' and (down,) sorted rows.
        matrices: (gate, up), each (E, N, K): the epilogue is SwiGLU, silu(gate)
            * up; or (down,): the epilogue multiplies by the score.
        plan: of the ids, from ``route_plan``.
        scores: (R, top_k), with (down,) only; None multiplies by nothing.

    Returns:
        (P, N) in sorted order, float32 (the stock path: mlx-lm's dtype).

    Raises:
        ValueError: shapes that do not fit, x not float, or scores with two
            matrices. A plan of other rows is a RuntimeError at evaluation.

    Source: mlx_lm.models.switch_layers.SwitchGLU.
    """
    check_float("grouped_qmm", "x", x)
    if len(matrices) not in (1, 2) or (len(matrices) == 2 and scores is not None):
        raise ValueError(
            f"grouped_qmm: got {len(matrices)} matrices and "
            f"{'scores' if scores is not None else 'no scores'}, supported are "
            "(gate, up) without scores and (down,) with or without"
        )
    for m in matrices:
        check_columns("grouped_qmm", x, m)
    reason = supported(x, matrices, plan, policy)
    if reason is None:
        count_fast("grouped_qmm", "cpu")
        return cpu.grouped_qmm(x, matrices, plan, scores)
    count_stock("grouped_qmm", reason)
    return reference(x, matrices, plan, scores, numerics="match")


def gather_sum(
    y: mx.array,
    plan: Plan,
    shared: Optional[mx.array] = None,
    residual: Optional[mx.array] = None,
    dtype: Optional[mx.Dtype] = None,
    policy: Policy = DEFAULT,
) -> mx.array:
    """A token's rows summed in fixed order: no atomics, bit-equal twice.

    Args:
        y: (P, N) in sorted order, from ``grouped_qmm``.
        plan: the same plan.
        shared: (R, N) output of the shared expert, gated; or None.
        residual: (R, N) or None.
        dtype: of the output; default that of the sum.

    Returns:
        (R, N): residual + (sum of the rows + shared).
    """
    reason = cpu.missing("gather_sum", policy)
    if reason is None:
        count_fast("gather_sum", "cpu")
        return cpu.gather_sum(y, plan, shared, residual, dtype)
    count_stock("gather_sum", reason)
    return reference_gather_sum(y, plan, shared, residual, dtype)
