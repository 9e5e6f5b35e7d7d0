"""What the ops along a sequence mean, in float64 numpy, from the exact values of their inputs."""

import mlx.core as mx
import numpy as np

FLOATS = (mx.bfloat16, mx.float16, mx.float32)


def exact(a):
    """An mlx array's values in float64."""
    if isinstance(a, np.ndarray):
        return a.astype(np.float64)
    if a.dtype in FLOATS:
        a = a.astype(mx.float32)
    return np.array(a).astype(np.float64)


def rounded(x, dtype):
    """float64 values as the nearest ``dtype``, in float64 again."""
    return exact(mx.array(x.astype(np.float32)).astype(dtype))


def rmse(x):
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def assert_close(got, wanted, ratio=1.01, relative=1e-6):
    """bf16 and fp16: error over that of the rounded truth; fp32: relative RMSE."""
    error = rmse(exact(got) - wanted)
    assert np.all(np.isfinite(exact(got)))
    if got.dtype == mx.float32:
        assert error <= relative * rmse(wanted) + 1e-30, f"relative RMSE {error / rmse(wanted):.2e}"
    else:
        floor = rmse(rounded(wanted, got.dtype) - wanted)
        assert error <= ratio * floor + 1e-30, f"{error / floor:.3f} times the rounding floor"


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def silu(x):
    return x * sigmoid(x)


def delta_prepare(qkv, a, b, conv_state, w, mask=None, lengths=None):
    B, T, C = qkv.shape
    x, taps = exact(qkv), exact(w.conv)[:, :, 0]
    kept = taps.shape[1] - 1
    if mask is not None:
        x = np.where(np.array(mask)[..., None], x, 0)
    before = np.zeros((B, kept, C)) if conv_state is None else exact(conv_state)
    window = np.concatenate([before, x], axis=1)
    mixed = silu(sum(window[:, i : i + T] * taps[:, i] for i in range(kept + 1)))
    keys = w.num_k_heads * w.head_k_dim
    q, k, v = np.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (t.reshape(B, T, w.num_k_heads, w.head_k_dim) for t in (q, k))
    q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
    z = exact(a) + exact(w.dt_bias)
    g = np.exp(-np.exp(exact(w.A_log)) * np.logaddexp(z, 0))
    ends = np.full(B, T) if lengths is None else np.clip(np.array(lengths), 0, T)
    state = np.stack([window[i, e : e + kept] for i, e in enumerate(ends)])
    v = v.reshape(B, T, w.num_v_heads, w.head_v_dim)
    return q * w.head_k_dim**-0.5, k, v, g, sigmoid(exact(b)), state


def delta_scan(q, k, v, g, beta, state=None, mask=None):
    q, k, v, g, beta = (exact(t) for t in (q, k, v, g, beta))
    B, T, Hv, Dv = v.shape
    q, k = (np.repeat(t, Hv // t.shape[2], axis=2) for t in (q, k))
    S = np.zeros((B, Hv, Dv, q.shape[-1])) if state is None else exact(state)
    y = np.zeros(v.shape)
    for t in range(T):
        live = np.ones(B, bool) if mask is None else np.array(mask)[:, t]
        new = S * g[:, t, :, None, None]
        delta = (v[:, t] - np.einsum("bhvk,bhk->bhv", new, k[:, t])) * beta[:, t, :, None]
        new = new + delta[..., None] * k[:, t, :, None]
        S = np.where(live[:, None, None, None], new, S)
        y[:, t] = np.where(live[:, None, None], np.einsum("bhvk,bhk->bhv", new, q[:, t]), 0)
    return y, S


def gated_norm(y, z, weight, eps):
    y, z = exact(y), exact(z)
    return silu(z) * y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * exact(weight)


def delta_step(qkv, z, b, a, conv_state, state, w, left_padding=None, lengths=None):
    B = qkv.shape[0]
    live = np.ones((B, 1), bool)
    if left_padding is not None:
        live &= (np.array(left_padding) <= 0)[:, None]
    if lengths is not None:
        live &= (np.array(lengths) > 0)[:, None]
    *inner, window = delta_prepare(qkv, a, b, conv_state, w, live, lengths)
    y, state = delta_scan(*inner, state, live)
    y = gated_norm(y, exact(z).reshape(y.shape), w.norm, w.eps)
    return y.reshape(B, 1, -1), window, state, live[:, 0]


def attention_prepare(q, k, v, q_norm, k_norm, rope, heads, kv_heads, offset, gated):
    B, T, _ = q.shape
    D = q_norm.weight.shape[0]
    q, k, v = exact(q).reshape(B, T, heads, -1), exact(k), exact(v)
    gate = q[..., D:].reshape(B, T, -1) if gated else None
    q = q[..., :D]
    k, v = (t.reshape(B, T, kv_heads, D) for t in (k, v))
    offset = np.broadcast_to(np.asarray(offset), (B,))
    position = (offset[:, None] + np.arange(T)) * rope.scale
    half = rope.dims // 2
    angle = position[..., None, None] * rope.base ** (-2.0 * np.arange(half) / max(rope.dims, 1))

    def turned(x, norm):
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * exact(norm.weight)
        a, b = x[..., :half], x[..., half : 2 * half]
        parts = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
        return np.concatenate([*parts, x[..., 2 * half :]], axis=-1).transpose(0, 2, 1, 3)

    return turned(q, q_norm), turned(k, k_norm), v.transpose(0, 2, 1, 3), gate


def dequantised(packed, bits, group):
    """A quantised cache's triple in float64, of its own codes, scales and biases."""
    codes, scales, biases = packed
    if not codes.size:
        return np.zeros((*codes.shape[:-1], codes.shape[-1] * 32 // bits))
    words = np.array(codes)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words & (2**bits - 1)).reshape(*words.shape[:-2], -1).astype(np.float64)
    scales, biases = (np.repeat(exact(t), group, axis=-1) for t in (scales, biases))
    return codes * scales + biases


def attention(q, keys, values, scale, causal, start=None, gate=None):
    """(B, T, heads * D); rows without any key give zeros."""
    q, keys, values = (exact(t) for t in (q, keys, values))
    B, H, T, D = q.shape
    S = keys.shape[2]
    keys, values = (np.repeat(t, H // t.shape[1], axis=1) for t in (keys, values))
    scores = scale * np.einsum("bhtd,bhsd->bhts", q, keys)
    seen = np.ones((B, 1, T, S), bool)
    if causal:
        seen &= np.arange(S) <= np.arange(S - T, S)[:, None]
    if start is not None:
        seen &= np.arange(S) >= np.array(start)[:, None, None, None]
    scores = np.where(seen, scores, -np.inf)
    most = np.max(scores, -1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0))
    total = weights.sum(-1, keepdims=True)
    o = np.einsum("bhts,bhsd->bhtd", weights / np.where(total > 0, total, 1), values)
    o = o.transpose(0, 2, 1, 3).reshape(B, T, H * D)
    return o if gate is None else o * sigmoid(exact(gate))
