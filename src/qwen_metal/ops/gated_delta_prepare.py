"""``gated_delta_prepare``: what stands before the recurrence of a Gated DeltaNet."""

from __future__ import annotations

from typing import NamedTuple, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy
from .matrix import check_float

#: mlx-lm's epsilon of the q/k norm, added to the sum of squares.
QK_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """Small weights and head counts of a Gated DeltaNet.

    conv: (C, W, 1) depthwise taps over C = 2 Hk Dk + Hv Dv channels.
    A_log, dt_bias: (Hv,). norm: (Dv,) of the output norm.
    """

    conv: mx.array
    A_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    eps: float

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays alone, for what traces them."""
        return list(self[:4])

    def of(self, arrays: list[mx.array]) -> "DeltaWeights":
        """The same with these arrays."""
        return self if arrays[0] is self.conv else DeltaWeights(*arrays, *self[4:])


def live_rows(
    length: int, left_padding: Optional[mx.array], lengths: Optional[mx.array]
) -> Optional[mx.array]:
    """(B, length) bool: token t of row b counts when left_padding <= t < lengths."""
    if left_padding is None and lengths is None:
        return None
    position, mask = mx.arange(length), None
    if left_padding is not None:
        mask = position >= left_padding[:, None]
    if lengths is not None:
        inside = position < lengths[:, None]
        mask = inside if mask is None else mask & inside
    return mask


def reference(
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    conv_state: Optional[mx.array],
    w: DeltaWeights,
    mask: Optional[mx.array] = None,
    lengths: Optional[mx.array] = None,
    numerics: str = "precise",
) -> tuple[mx.array, ...]:
    """The meaning in MLX operations; ``match`` is what mlx-lm computes."""
    B, T, C = qkv.shape
    dtype, kept = qkv.dtype, w.conv.shape[1] - 1
    if conv_state is None:
        conv_state = mx.zeros((B, kept, C), dtype=dtype)
    if mask is not None:
        qkv = mx.where(mask[..., None], qkv, 0)
    window = mx.concatenate([conv_state, qkv], axis=1)
    if lengths is not None:
        places = mx.clip(lengths, 0, T)[:, None] + mx.arange(kept)
        new_state = mx.take_along_axis(window, places[..., None], axis=1)
    else:
        # A plain slice would pin the whole window in memory.
        new_state = mx.contiguous(window[:, T:, :])
    taps = w.conv
    if numerics == "precise":
        window, taps = window.astype(mx.float32), taps.astype(mx.float32)
        a, b = a.astype(mx.float32), b.astype(mx.float32)
    mixed = nn.silu(mx.conv1d(window, taps, groups=C))
    keys = w.num_k_heads * w.head_k_dim
    q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
    q = q.reshape(B, T, w.num_k_heads, w.head_k_dim)
    k = k.reshape(B, T, w.num_k_heads, w.head_k_dim)
    v = v.reshape(B, T, w.num_v_heads, w.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=w.head_k_dim**-0.5, eps=QK_EPS)
    dt_bias = w.dt_bias.astype(a.dtype) if numerics == "precise" else w.dt_bias
    return q, k, v, compute_g(w.A_log, a, dt_bias), mx.sigmoid(b), new_state


def supported(
    qkv: mx.array, w: DeltaWeights, policy: Policy = DEFAULT
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("gated_delta_prepare", policy)


def gated_delta_prepare(
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    conv_state: Optional[mx.array],
    w: DeltaWeights,
    mask: Optional[mx.array] = None,
    lengths: Optional[mx.array] = None,
    policy: Policy = DEFAULT,
) -> tuple[mx.array, ...]:
    """Causal convolution, SiLU, q/k norm and gates of T tokens.

    Args:
        qkv: (B, T, C), projected, q then k then v, float.
        a, b: (B, T, Hv), projected, float.
        conv_state: (B, W - 1, C) window before these tokens, or None for zeros.
        w: convolution taps, A_log, dt_bias, head counts.
        mask: (B, T) bool, False where a token is padding; or None.
        lengths: (B,) int, real tokens of each row (right padding); or None.

    Returns:
        q, k (B, T, Hk, Dk), of norm Dk**-0.5 and 1; v (B, T, Hv, Dv); decay g
        (B, T, Hv), 0-1, float32; beta (B, T, Hv), 0-1; the window after the
        tokens (B, W - 1, C) in the dtype of ``qkv``. q, k, v, beta are float32
        (the stock path: the dtype of ``qkv``).

    Raises:
        ValueError: qkv not float, or its channels do not fit the taps.

    Source: mlx_lm.models.qwen3_5.GatedDeltaNet.
    """
    check_float("gated_delta_prepare", "qkv", qkv)
    if qkv.shape[-1] != w.conv.shape[0]:
        raise ValueError(
            f"gated_delta_prepare: qkv has {qkv.shape[-1]} channels, the "
            f"convolution has {w.conv.shape[0]}"
        )
    reason = supported(qkv, w, policy)
    if reason is None:
        routes.fast("gated_delta_prepare", "cpu")
        return cpu.gated_delta_prepare(qkv, a, b, conv_state, w, mask, lengths)
    routes.stock("gated_delta_prepare", reason)
    return reference(qkv, a, b, conv_state, w, mask, lengths, numerics="match")
