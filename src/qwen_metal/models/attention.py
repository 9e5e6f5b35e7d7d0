"""The full-attention block: projections, cache, attention, output projection."""

from __future__ import annotations

from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_moe, qwen3_next
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from ..ops.attention_prefill import attention_prefill
from ..ops.attention_prepare import Rope, attention_prepare
from ..ops.gqa_decode import QuantisedKV, gqa_decode
from ..ops.kv_append import kv_append
from ..ops.matrix import Matrix
from ..ops.projections import projections
from ..routes import Unsupported, count_stock, strictly
from .state import FROM_CACHE, check_plain, norm_of, state_of, stock_class


class GatedAttention(qwen3_next.Qwen3NextAttention):
    """Fused attention of Qwen3.5 and Qwen3-Next, with a sigmoid output gate."""

    def __call__(self, x, mask=None, cache=None) -> mx.array:
        return attention(self, x, mask=mask, cache=cache)


class PlainAttention(qwen3_moe.Attention):
    """Fused attention of Qwen3-MoE."""

    def __call__(self, x, mask=None, cache=None) -> mx.array:
        return attention(self, x, mask=mask, cache=cache)


def attention(
    block: nn.Module,
    x: mx.array,
    norm: Optional[nn.Module] = None,
    residual: Optional[mx.array] = None,
    mask: Any = FROM_CACHE,
    cache: Any = None,
) -> mx.array:
    """``residual + block(norm(x))`` for x (B, T, D), fused where possible.

    ``mask`` as mlx-lm passes it (None, ``"causal"`` or an array), or FROM_CACHE:
    the cache's left padding goes to the operations instead.
    """
    state = state_of(block)
    with strictly(state.strict):
        try:
            folded, first, out, norms, rope = read(block, norm)
        except Unsupported as error:
            count_stock("attention", str(error))
            if mask is FROM_CACHE:
                mask = create_attention_mask(x, cache)
            h = x if norm is None else norm(x)
            y = stock_class(block).__call__(block, h, mask, cache)
            return y if residual is None else residual + y
        policy, start = state.policy, None
        if mask is FROM_CACHE:
            start, mask = _span(x, cache)
        heads, kv_heads = _heads(block)
        q, k, v = projections(x, first, folded, policy=policy)
        q, k, v, gate = attention_prepare(
            q,
            k,
            v,
            *norms,
            rope,
            heads,
            kv_heads,
            0 if cache is None else cache.offset,
            _gated(block),
            policy,
        )
        quantised = None
        if cache is not None:
            k, v = kv_append(cache, k, v, policy)
            if hasattr(cache, "bits"):
                quantised = QuantisedKV(cache.group_size, cache.bits)
        one_token = x.shape[1] == 1 and not isinstance(mask, str)
        attend = gqa_decode if one_token else attention_prefill
        o = attend(q, k, v, block.scale, start, mask, gate, quantised, policy)
        return projections(o, [out], residual=residual, policy=policy)[0]


def read(block: nn.Module, norm: Optional[nn.Module] = None) -> tuple:
    """The block's weights as its modules hold them now.

    Raises:
        Unsupported: a layer or mode the fused path does not know.
    """
    check_plain(block)
    folded = None if norm is None else norm_of(norm)
    first = [Matrix.of(block[n]) for n in ("q_proj", "k_proj", "v_proj")]
    norms = norm_of(block.q_norm), norm_of(block.k_norm)
    return folded, first, Matrix.of(block.o_proj), norms, Rope.of(block.rope)


def _heads(block: nn.Module) -> tuple[int, int]:
    """Query and KV heads, read at each use because sharding changes them."""
    if _gated(block):
        return block.num_attention_heads, block.num_key_value_heads
    return block.n_heads, block.n_kv_heads


def _span(x: mx.array, cache: Any) -> tuple[Optional[mx.array], Any]:
    """First position each row may read, and a mask where that does not say it all."""
    T = x.shape[1]
    if cache is None or type(cache) in (KVCache, QuantizedKVCache):
        return None, None if T == 1 else "causal"
    if type(cache) is BatchKVCache:
        return cache.left_padding, None if T == 1 else "causal"
    return None, create_attention_mask(x, cache)


def _gated(block: nn.Module) -> bool:
    """Whether the block's q_proj also yields an output gate."""
    return isinstance(block, qwen3_next.Qwen3NextAttention)
