"""``gqa_decode``: attention of one new token a row over its cached keys and values."""

from __future__ import annotations

from typing import Any, Optional

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy


class QuantisedKV:
    """Bits and group size of quantised keys and values, as mlx-lm's caches name them."""

    def __init__(self, group_size: int, bits: int):
        self.group_size, self.bits = group_size, bits


def reference(
    q: mx.array,
    keys: Any,
    values: Any,
    scale: float,
    mask: Optional[mx.array] = None,
    gate: Optional[mx.array] = None,
    quantised: Optional[QuantisedKV] = None,
    numerics: str = "precise",
) -> mx.array:
    """The meaning in MLX operations; ``match`` is what mlx-lm computes."""
    dtype = q.dtype
    if numerics == "precise":
        if quantised is not None:
            keys, values = (dequantised(t, quantised) for t in (keys, values))
            quantised = None
        q, keys, values = (t.astype(mx.float32) for t in (q, keys, values))
        gate = None if gate is None else gate.astype(mx.float32)
    B, H, T, D = q.shape
    o = scaled_dot_product_attention(
        q, keys, values, cache=quantised, scale=scale, mask=mask
    )
    o = o.transpose(0, 2, 1, 3).reshape(B, T, -1)
    if gate is not None:
        o = o * mx.sigmoid(gate)
    return o.astype(dtype)


def dequantised(packed: tuple, quantised: QuantisedKV) -> mx.array:
    """A (packed, scales, biases) triple of a quantised cache as float32."""
    weight, scales, biases = packed
    return mx.dequantize(
        weight,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=quantised.group_size,
        bits=quantised.bits,
    )


def supported(
    q: mx.array,
    keys: Any,
    mask: Optional[mx.array] = None,
    quantised: Optional[QuantisedKV] = None,
    policy: Policy = DEFAULT,
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    if mask is not None:
        return "an explicit mask array (this cache class has no length form)"
    return layout_reason(q, quantised) or cpu.missing("gqa_decode", policy)


def layout_reason(q: mx.array, quantised: Optional[QuantisedKV]) -> Optional[str]:
    """None, or why no kernel reads heads of this size or keys of this format."""
    if q.shape[-1] % 16:
        return f"head size {q.shape[-1]} (kernels take multiples of 16)"
    if quantised is not None and (
        quantised.bits not in (2, 4, 8) or quantised.group_size not in (32, 64, 128)
    ):
        return f"{quantised.bits}-bit keys in groups of {quantised.group_size}"
    return None


def mask_of(start: Optional[mx.array], length: int) -> Optional[mx.array]:
    """The mask that says the same as a first position, (B, 1, 1, length)."""
    if start is None:
        return None
    return (mx.arange(length) >= start[:, None])[:, None, None]


def gqa_decode(
    q: mx.array,
    keys: Any,
    values: Any,
    scale: float,
    start: Optional[mx.array] = None,
    mask: Optional[mx.array] = None,
    gate: Optional[mx.array] = None,
    quantised: Optional[QuantisedKV] = None,
    policy: Policy = DEFAULT,
) -> mx.array:
    """softmax(scale q k^T) v, a group of query heads a KV head, gated.

    Args:
        q: (B, Hq, 1, D), float.
        keys, values: (B, Hkv, S, D), may be a slice of a longer buffer; or,
            with ``quantised``, triples (packed, scales, biases).
        scale: multiplies the scores.
        start: (B,) int, first position of each row that counts (its left
            padding); or None for 0.
        mask: a mask broadcastable to (B, Hq, 1, S) instead of ``start``, for
            cache classes that have no other form; stock path only.
        gate: (B, 1, Hq * D) before the sigmoid, or None.
        quantised: how keys and values are packed, or None for float.

    Returns:
        (B, 1, Hq * D) in the dtype of ``q``.

    Raises:
        ValueError: more than one token, both a start and a mask, or heads that
            do not divide.

    Source: mlx_lm.models.base.scaled_dot_product_attention.
    """
    heads = (keys[0] if quantised is not None else keys).shape[1]
    if q.shape[2] != 1 or q.shape[1] % heads:
        raise ValueError(
            f"gqa_decode: q is {q.shape} over {heads} KV heads, supported are one "
            "token and a multiple of the KV heads"
        )
    if start is not None and mask is not None:
        raise ValueError("gqa_decode: got a start and a mask, supported is one of them")
    reason = supported(q, keys, mask, quantised, policy)
    if reason is None:
        routes.fast("gqa_decode", "cpu")
        return cpu.gqa_decode(q, keys, values, scale, start, gate, quantised)
    routes.stock("gqa_decode", reason)
    if start is not None:
        mask = mask_of(start, (keys[0] if quantised is not None else keys).shape[2])
    return reference(q, keys, values, scale, mask, gate, quantised, numerics="match")
