"""``gated_delta_scan``: the gated delta rule over T tokens, state kept in registers."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: Optional[mx.array] = None,
    mask: Optional[mx.array] = None,
    numerics: str = "precise",
) -> tuple[mx.array, mx.array]:
    """The recurrence, token by token, as mlx-lm writes it."""
    if numerics == "precise":
        q, k, v, g, beta = (t.astype(mx.float32) for t in (q, k, v, g, beta))
    return gated_delta_ops(q, k, v, g, beta, state, mask)


def stock(q, k, v, g, beta, state=None, mask=None) -> tuple[mx.array, mx.array]:
    """What mlx-lm computes here: its own Metal kernel, or the loop of operations."""
    metal = mx.default_device() == mx.gpu and mx.metal.is_available()
    if not metal or k.shape[-1] % 32:
        return reference(q, k, v, g, beta, state, mask, numerics="match")
    if state is None:
        state = mx.zeros((*v.shape[:1], *v.shape[2:], k.shape[-1]), mx.float32)
    return gated_delta_kernel(q, k, v, g, beta, state, mask)


def supported(
    q: mx.array,
    v: mx.array,
    state: Optional[mx.array] = None,
    policy: Policy = DEFAULT,
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    if policy.delta_scan == "memory":
        return "policy: delta_scan='memory'"
    return cpu.missing("gated_delta_scan", policy)


def gated_delta_scan(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: Optional[mx.array] = None,
    mask: Optional[mx.array] = None,
    policy: Policy = DEFAULT,
) -> tuple[mx.array, mx.array]:
    """S = g S; S += k (beta (v - S k))^T; y = S q, for each token in turn.

    Args:
        q, k: (B, T, Hk, Dk), normalised (``gated_delta_prepare``).
        v: (B, T, Hv, Dv), Hv a multiple of Hk.
        g, beta: (B, T, Hv), 0-1.
        state: (B, Hv, Dv, Dk) float32, or None for zeros.
        mask: (B, T) bool; a False token leaves the state and its y is undefined.

    Returns:
        y (B, T, Hv, Dv) float32 (the stock path: the dtype of ``q``) and the
        state after the last token, float32.

    Raises:
        ValueError: shapes that do not fit, or a state that is not float32 (a
            bfloat16 state drifts, then collapses).

    Source: mlx_lm.models.gated_delta.gated_delta_ops.
    """
    check("gated_delta_scan", q, k, v, g, beta, state)
    reason = supported(q, v, state, policy)
    if reason is None:
        routes.fast("gated_delta_scan", "cpu")
        return cpu.gated_delta_scan(q, k, v, g, beta, state, mask)
    routes.stock("gated_delta_scan", reason)
    if policy.delta_scan == "memory":
        return reference(q, k, v, g, beta, state, mask, numerics="match")
    return stock(q, k, v, g, beta, state, mask)


def check(name: str, q, k, v, g, beta, state) -> None:
    """Raise a ValueError unless the shapes of a recurrence fit."""
    B, T, Hv, Dv = v.shape
    if q.shape != k.shape or q.shape[:2] != (B, T) or Hv % q.shape[2]:
        raise ValueError(
            f"{name}: q {q.shape}, k {k.shape}, v {v.shape}; supported are (B, T, "
            "Hk, Dk) twice and (B, T, Hv, Dv) with Hv a multiple of Hk"
        )
    if g.shape != (B, T, Hv) or beta.shape != (B, T, Hv):
        raise ValueError(
            f"{name}: g {g.shape}, beta {beta.shape}, supported is {(B, T, Hv)}"
        )
    wanted = (B, Hv, Dv, q.shape[-1])
    if state is not None and (state.shape != wanted or state.dtype != mx.float32):
        raise ValueError(
            f"{name}: state is {state.dtype} {state.shape}, supported is float32 {wanted}"
        )
