"""``attention_prepare``: query/key norm, RoPE and the gate's split."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Union

import mlx.core as mx
import mlx.nn as nn

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy
from .matrix import Norm, rms_norm


class Rope(NamedTuple):
    """Rotary embedding of a layer.

    module: mlx-lm's own rope module, which defines the meaning.
    dims: leading dimensions of a head that are rotated. base, scale: of
    nn.RoPE, or None where the module is of another kind (yarn, llama3...),
    which no fast route serves.
    """

    module: Callable
    dims: int
    base: Optional[float]
    scale: float

    @classmethod
    def of(cls, module: nn.Module) -> "Rope":
        """Read an mlx-lm rope module."""
        if type(module) is nn.RoPE and not module.traditional:
            return cls(module, module.dims, module.base, module.scale)
        return cls(module, getattr(module, "dims", getattr(module, "dim", 0)), None, 1.0)


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_norm: Norm,
    k_norm: Norm,
    rope: Rope,
    num_heads: int,
    num_kv_heads: int,
    offset: Union[int, mx.array] = 0,
    gated: bool = True,
    numerics: str = "precise",
) -> tuple[mx.array, mx.array, mx.array, Optional[mx.array]]:
    """The meaning in MLX operations; ``match`` is what mlx-lm computes."""
    B, T, _ = q.shape
    q, gate = q.reshape(B, T, num_heads, -1), None
    if gated:
        q, gate = mx.split(q, 2, axis=-1)
        gate = gate.reshape(B, T, -1)
    k, v = k.reshape(B, T, num_kv_heads, -1), v.reshape(B, T, num_kv_heads, -1)
    dtype = k.dtype
    q = rms_norm(q, q_norm, numerics).transpose(0, 2, 1, 3)
    k = rms_norm(k, k_norm, numerics).transpose(0, 2, 1, 3)
    q, k = rope.module(q, offset=offset), rope.module(k, offset=offset)
    return q.astype(dtype), k.astype(dtype), v.transpose(0, 2, 1, 3), gate


def supported(
    q: mx.array, rope: Rope, policy: Policy = DEFAULT
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    if not policy.fuse_qk_prepare:
        return "policy: fuse_qk_prepare=False"
    if rope.base is None:
        return f"{type(rope.module).__name__} has no fused kernel"
    return cpu.missing("attention_prepare", policy)


def attention_prepare(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_norm: Norm,
    k_norm: Norm,
    rope: Rope,
    num_heads: int,
    num_kv_heads: int,
    offset: Union[int, mx.array] = 0,
    gated: bool = True,
    policy: Policy = DEFAULT,
) -> tuple[mx.array, mx.array, mx.array, Optional[mx.array]]:
    """Projected rows to rotated heads.

    Args:
        q: (B, T, Hq * 2 D) when gated, each head's query then its gate; else
            (B, T, Hq * D). k, v: (B, T, Hkv * D). Float.
        q_norm, k_norm: weight (D,) and epsilon.
        rope: which dimensions rotate and how.
        num_heads, num_kv_heads: Hq and Hkv.
        offset: position of the first token, one number or (B,) int.
        gated: whether ``q`` carries a gate.

    Returns:
        q (B, Hq, T, D), k and v (B, Hkv, T, D), and the gate before its
        sigmoid (B, T, Hq * D) or None; all in the dtype of their input.

    Raises:
        ValueError: columns that do not divide into heads.

    Source: mlx_lm.models.qwen3_next.Qwen3NextAttention.
    """
    D, parts = q_norm.weight.shape[0], 2 if gated else 1
    if q.shape[-1] != num_heads * D * parts or k.shape[-1] != num_kv_heads * D:
        raise ValueError(
            f"attention_prepare: q has {q.shape[-1]} columns, k {k.shape[-1]}; "
            f"supported are {num_heads * D * parts} and {num_kv_heads * D} "
            f"({num_heads} and {num_kv_heads} heads of {D}, gated={gated})"
        )
    reason = supported(q, rope, policy)
    arguments = (q, k, v, q_norm, k_norm, rope, num_heads, num_kv_heads, offset, gated)
    if reason is None:
        routes.fast("attention_prepare", "cpu")
        return cpu.attention_prepare(*arguments)
    routes.stock("attention_prepare", reason)
    return reference(*arguments, numerics="match")
