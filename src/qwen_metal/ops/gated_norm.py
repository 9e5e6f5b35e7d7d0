"""``gated_norm``: RMSNorm of a head's output, multiplied by SiLU of its gate."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx
from mlx_lm.models.activations import precise_swiglu

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy
from .matrix import Norm


def reference(
    y: mx.array,
    z: mx.array,
    norm: Norm,
    dtype: Optional[mx.Dtype] = None,
    numerics: str = "precise",
) -> mx.array:
    """The meaning in MLX operations; ``match`` is what mlx-lm computes."""
    if numerics == "match":
        h = precise_swiglu(y, z, mx.fast.rms_norm(y, norm.weight, norm.eps))
        return h.astype(dtype or y.dtype)
    h = mx.fast.rms_norm(
        y.astype(mx.float32), norm.weight.astype(mx.float32), norm.eps
    )
    z = z.astype(mx.float32)
    return (z * mx.sigmoid(z) * h).astype(dtype or y.dtype)


def supported(y: mx.array, z: mx.array, policy: Policy = DEFAULT) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("gated_norm", policy)


def gated_norm(
    y: mx.array,
    z: mx.array,
    norm: Norm,
    dtype: Optional[mx.Dtype] = None,
    policy: Policy = DEFAULT,
) -> mx.array:
    """``silu(z) * rms_norm(y)`` over the last axis.

    Args:
        y: (..., Hv, Dv), output of the recurrence, float.
        z: (..., Hv, Dv), projected gate, float.
        norm: weight (Dv,) and epsilon.
        dtype: of the output; default that of ``y``.

    Returns:
        (..., Hv, Dv).

    Raises:
        ValueError: y and z differ in shape.

    Source: mlx_lm.models.qwen3_next.Qwen3NextRMSNormGated.
    """
    if y.shape != z.shape:
        raise ValueError(f"gated_norm: y is {y.shape}, z is {z.shape}, supported are equal shapes")
    reason = supported(y, z, policy)
    if reason is None:
        routes.fast("gated_norm", "cpu")
        return cpu.gated_norm(y, z, norm, dtype)
    routes.stock("gated_norm", reason)
    return reference(y, z, norm, dtype, numerics="match")
