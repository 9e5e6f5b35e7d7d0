"""``attention_prefill``: causal attention of T tokens; scores never whole in memory."""

from __future__ import annotations

from typing import Any, Optional

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy
from . import gqa_decode
from .gqa_decode import QuantisedKV

#: What mlx-lm computes for a prefill is the function it computes for one token.
reference = gqa_decode.reference


def supported(
    q: mx.array,
    keys: Any,
    mask: Any = "causal",
    quantised: Optional[QuantisedKV] = None,
    policy: Policy = DEFAULT,
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    if isinstance(mask, mx.array):
        return "an explicit mask array (this cache class has no length form)"
    reason = gqa_decode.layout_reason(q, quantised)
    return reason or cpu.missing("attention_prefill", policy)


def mask_of(start: Optional[mx.array], T: int, length: int, mask: Any) -> Any:
    """``mask``, or the causal mask that starts at each row's first position."""
    if start is None:
        return mask
    return create_causal_mask(T, offset=length - T, left_padding=start)


def attention_prefill(
    q: mx.array,
    keys: Any,
    values: Any,
    scale: float,
    start: Optional[mx.array] = None,
    mask: Any = "causal",
    gate: Optional[mx.array] = None,
    quantised: Optional[QuantisedKV] = None,
    policy: Policy = DEFAULT,
) -> mx.array:
    """softmax(scale q k^T) v of the last T of S positions, causal, gated.

    Args:
        q: (B, Hq, T, D), float, the last T positions of the keys.
        keys, values: (B, Hkv, S, D), S >= T; or, with ``quantised``, triples.
        scale: multiplies the scores.
        start: (B,) int, left padding of each row, or None for 0. A row of
            padding has no key to read; its output is undefined.
        mask: ``"causal"``, None (every key), or an array (stock path only).
        gate: (B, T, Hq * D) before the sigmoid, or None.
        quantised: how keys and values are packed, or None for float.

    Returns:
        (B, T, Hq * D) in the dtype of ``q``.

    Raises:
        ValueError: fewer keys than queries, a start with another mask than
            ``"causal"``, or heads that do not divide.

    Source: mlx_lm.models.base.scaled_dot_product_attention.
    """
    packed = keys[0] if quantised is not None else keys
    (_, heads, length), T = packed.shape[:3], q.shape[2]
    causal = isinstance(mask, str) and mask == "causal"
    if q.shape[1] % heads or (causal and length < T):
        raise ValueError(
            f"attention_prefill: q is {q.shape} over {heads} KV heads and {length} "
            "keys, supported are a multiple of the heads and at least as many keys"
        )
    if start is not None and not causal:
        raise ValueError("attention_prefill: a start goes with mask='causal' only")
    reason = supported(q, keys, mask, quantised, policy)
    if reason is None:
        routes.fast("attention_prefill", "cpu")
        return cpu.attention_prefill(q, keys, values, scale, start, causal, gate, quantised)
    routes.stock("attention_prefill", reason)
    mask = mask_of(start, T, length, mask)
    return reference(q, keys, values, scale, mask, gate, quantised, numerics="match")
