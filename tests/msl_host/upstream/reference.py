"""Inputs, and what the kernels should give, in float64."""

import mlx.core as mx
import numpy as np

from ..run import from_bfloat, to_bfloat


def wide(bits):
    """bfloat bits -> float64."""
    return from_bfloat(bits).astype(np.float64)


def rms(values):
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def relative(result, expected):
    """RMS error over RMS of the expected."""
    return rms(np.asarray(result, np.float64) - expected) / rms(expected)


def floor(expected):
    """RMS error, relative, of rounding the expected values to bfloat: nothing bfloat can be better."""
    return rms(wide(to_bfloat(expected)) - expected) / rms(expected)


def quantise(weights, bits, group=64):
    """float array -> (codes uint32, scales, biases as bfloat bits, the same matrix in float64), as MLX quantises."""
    parts = mx.quantize(mx.array(weights).astype(mx.bfloat16), group_size=group, bits=bits)
    codes, scales, biases = parts
    exact = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
    mx.eval(codes, exact)
    bits_of = [np.array(p.view(mx.uint16)) for p in (scales, biases)]
    return np.array(codes), *bits_of, np.array(exact).astype(np.float64)


def attention(queries, keys, values, scale, mask=None, causal=False):
    """Softmax attention in float64; (H, L, D) bfloat bits, key heads repeated to match; mask True = visible."""
    q, k, v = map(wide, (queries, keys, values))
    repeat = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, repeat, 0), np.repeat(v, repeat, 0)
    scores = np.einsum("hqd,hkd->hqk", q * scale, k)
    if causal:
        visible = np.arange(k.shape[1])[None] <= np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores = np.where(visible, scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,hkd->hqd", weights / weights.sum(-1, keepdims=True), v)


def gated_delta(q, k, v, g, beta, state, mask=None):
    """The recurrence in float64: q, k (B, T, Hk, Dk), v (B, T, Hv, Dv), g (B, T, Hv) or (B, T, Hv, Dk),
    beta (B, T, Hv), state (B, Hv, Dv, Dk), mask (B, T). Returns (y (B, T, Hv, Dv), state)."""
    q, k, v, g, beta, state = (np.asarray(a, np.float64) for a in (q, k, v, g, beta, state))
    q, k = (np.repeat(a, v.shape[2] // q.shape[2], 2) for a in (q, k))
    outputs = []
    for t in range(v.shape[1]):
        decay = g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None, :]
        kept, state = state, state * decay
        delta = (v[:, t] - (state * k[:, t, :, None, :]).sum(-1)) * beta[:, t, :, None]
        state = state + k[:, t, :, None, :] * delta[..., None]
        y = (state * q[:, t, :, None, :]).sum(-1)
        if mask is not None:
            state = np.where(mask[:, t, None, None, None], state, kept)
            y = np.where(mask[:, t, None, None], y, 0)
        outputs.append(y)
    return np.stack(outputs, 1), state
