"""``gated_delta_chunk``: the gated delta rule by chunks, as matrix products."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx

from ..kernels import cpu
from ..policy import DEFAULT, Policy
from ..routes import count_fast, count_stock
from .gated_delta_scan import check

#: Smallest normal float32.
SMALLEST = 2.0**-126

#: Tokens of a chunk.
CHUNK = 64


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: Optional[mx.array] = None,
    mask: Optional[mx.array] = None,
    chunk: int = CHUNK,
) -> tuple[mx.array, mx.array]:
    """The chunked (WY) form in MLX operations, float32.

    Within a chunk, with c_t the running sum of log g, the updates u solve the
    unit lower triangular system (I + L) u = beta (v - e^c S k), where
    L[t, s] = beta_t e^(c_t - c_s) (k_t . k_s) for s < t. Only differences
    c_t - c_s <= 0 are exponentiated, so decay near 0 cannot overflow.
    """
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    q, k, v, g, beta = (t.astype(mx.float32) for t in (q, k, v, g, beta))
    if mask is not None:
        # A skipped token neither decays nor updates the state.
        g = mx.where(mask[..., None], g, 1.0)
        beta = mx.where(mask[..., None], beta, 0.0)
    q, k = (mx.repeat(t, Hv // Hk, axis=2).swapaxes(1, 2) for t in (q, k))
    v, g, beta = v.swapaxes(1, 2), g.swapaxes(1, 2), beta.swapaxes(1, 2)
    if state is None:
        state = mx.zeros((B, Hv, Dv, Dk), mx.float32)
    ys = []
    for start in range(0, T, chunk):
        piece = slice(start, min(start + chunk, T))
        y, state = _one_chunk(*(t[:, :, piece] for t in (q, k, v, g, beta)), state)
        ys.append(y)
    y = mx.concatenate(ys, axis=2) if ys else mx.zeros((B, Hv, 0, Dv), mx.float32)
    return y.swapaxes(1, 2), state


def _one_chunk(q, k, v, g, beta, state):
    """One chunk of C tokens: q, k (B, H, C, Dk), v (B, H, C, Dv), g, beta (B, H, C)."""
    C = q.shape[2]
    # log 0 is -inf, and -inf - -inf is nan: the smallest normal stands for 0.
    log_g = mx.log(mx.maximum(g, SMALLEST))
    run = mx.cumsum(log_g, axis=-1)
    row, column = mx.arange(C)[:, None], mx.arange(C)[None]
    decay = mx.exp(mx.where(row >= column, run[..., :, None] - run[..., None, :], 0.0))
    strict = mx.where(row > column, decay * (k @ k.swapaxes(-1, -2)), 0.0)
    strict = strict * beta[..., None]
    from_start = mx.exp(run)[..., None]
    right = beta[..., None] * (v - from_start * (k @ state.swapaxes(-1, -2)))
    u = _solve_unit_lower(strict, right)
    inner = mx.where(row >= column, decay * (q @ k.swapaxes(-1, -2)), 0.0)
    y = from_start * (q @ state.swapaxes(-1, -2)) + inner @ u
    to_end = mx.exp(run[..., -1:] - run)[..., None]
    state = mx.exp(run[..., -1])[..., None, None] * state
    return y, state + u.swapaxes(-1, -2) @ (to_end * k)


def _solve_unit_lower(strict: mx.array, right: mx.array) -> mx.array:
    """x with (I + strict) x = right, by doubling: strict is nilpotent.

    (I + L)^-1 = (I - L)(I + L^2)(I + L^4)...; ceil(log2 C) products.
    """
    C = strict.shape[-1]
    x, power, reach = right - strict @ right, strict @ strict, 2
    while reach < C:
        x = x + power @ x
        power, reach = power @ power, reach * 2
    return x


def supported(q: mx.array, v: mx.array, policy: Policy = DEFAULT) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("gated_delta_chunk", policy)


def gated_delta_chunk(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: Optional[mx.array] = None,
    mask: Optional[mx.array] = None,
    policy: Policy = DEFAULT,
) -> tuple[mx.array, mx.array]:
    """The same function as ``gated_delta_scan``, by chunks on matrix units.

    Arguments, results and errors are those of ``gated_delta_scan``.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (the WY form).
    """
    check("gated_delta_chunk", q, k, v, g, beta, state)
    reason = supported(q, v, policy)
    if reason is None:
        count_fast("gated_delta_chunk", "cpu")
        return cpu.gated_delta_chunk(q, k, v, g, beta, state, mask)
    count_stock("gated_delta_chunk", reason)
    return reference(q, k, v, g, beta, state, mask)
