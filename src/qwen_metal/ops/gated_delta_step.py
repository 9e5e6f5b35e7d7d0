"""``gated_delta_step``: a whole Gated DeltaNet for one token, between its projections."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx

from ..kernels import cpu
from ..policy import DEFAULT, Policy
from ..routes import count_fast, count_stock
from . import gated_delta_prepare, gated_delta_scan, gated_norm
from .gated_delta_prepare import DeltaWeights, live_rows
from .matrix import Norm


def reference(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    conv_state: Optional[mx.array],
    state: Optional[mx.array],
    w: DeltaWeights,
    left_padding: Optional[mx.array] = None,
    lengths: Optional[mx.array] = None,
    numerics: str = "precise",
) -> tuple[mx.array, mx.array, mx.array]:
    """Prepare, recurrence, output norm; ``match`` is what mlx-lm computes."""
    mask = live_rows(qkv.shape[1], left_padding, lengths)
    q, k, v, g, beta, conv_state = gated_delta_prepare.reference(
        qkv, a, b, conv_state, w, mask, lengths, numerics
    )
    if numerics == "match":
        y, state = gated_delta_scan.stock(q, k, v, g, beta, state, mask)
    else:
        y, state = gated_delta_scan.reference(q, k, v, g, beta, state, mask, numerics)
    norm = Norm(w.norm, w.eps)
    y = gated_norm.reference(y, z.reshape(y.shape), norm, qkv.dtype, numerics)
    return y.reshape(*qkv.shape[:2], -1), conv_state, state


def supported(
    qkv: mx.array, w: DeltaWeights, policy: Policy = DEFAULT
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("gated_delta_step", policy)


def gated_delta_step(
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    conv_state: Optional[mx.array],
    state: Optional[mx.array],
    w: DeltaWeights,
    left_padding: Optional[mx.array] = None,
    lengths: Optional[mx.array] = None,
    policy: Policy = DEFAULT,
) -> tuple[mx.array, mx.array, mx.array]:
    """Convolution window, SiLU, q/k norm, gates, recurrence, output norm and gate.

    Args:
        qkv: (B, 1, C), z: (B, 1, Hv * Dv), b, a: (B, 1, Hv), projected, float.
        conv_state: (B, W - 1, C), state: (B, Hv, Dv, Dk) float32, or None.
        w: the layer's small weights and head counts.
        left_padding: (B,) int; a row above 0 is still padding. Or None.
        lengths: (B,) int; a row at or below 0 has ended. Or None.

    Returns:
        y (B, 1, Hv * Dv) in the dtype of ``qkv``, the window and the state
        after the token. A row that does not count keeps its state.

    Raises:
        ValueError: more than one token.

    Source: mlx_lm.models.qwen3_5.GatedDeltaNet.
    """
    if qkv.shape[1] != 1:
        raise ValueError(f"gated_delta_step: got {qkv.shape[1]} tokens, supported is 1")
    reason = supported(qkv, w, policy)
    if reason is None:
        count_fast("gated_delta_step", "cpu")
        return cpu.gated_delta_step(
            qkv, z, b, a, conv_state, state, w, left_padding, lengths
        )
    count_stock("gated_delta_step", reason)
    return reference(
        qkv, z, b, a, conv_state, state, w, left_padding, lengths, numerics="match"
    )
