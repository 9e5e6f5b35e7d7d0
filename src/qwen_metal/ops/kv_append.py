"""``kv_append``: new keys and values written into a layer's cache."""

from __future__ import annotations

from typing import Any, Optional

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy


def reference(cache: Any, k: mx.array, v: mx.array) -> tuple[Any, Any]:
    """What mlx-lm does: the cache's own update, which also moves its offset."""
    return cache.update_and_fetch(k, v)


def supported(cache: Any, k: mx.array, policy: Policy = DEFAULT) -> Optional[str]:
    """None, or why no fast route serves this call."""
    if type(cache) not in (KVCache, QuantizedKVCache, BatchKVCache):
        return f"{type(cache).__name__} moves its rows itself"
    return cpu.missing("kv_append", policy)


def kv_append(
    cache: Any, k: mx.array, v: mx.array, policy: Policy = DEFAULT
) -> tuple[Any, Any]:
    """Append to an mlx-lm cache of any class and give back what attention reads.

    Args:
        cache: an mlx-lm KV cache (plain, rotating, quantised, batch...).
        k, v: (B, Hkv, T, D), float, rotated.

    Returns:
        keys and values (B, Hkv, S, D) of all S tokens in the cache; for a
        quantised cache each a triple (packed, scales, biases). The cache's
        arrays, offset and index are afterwards exactly what mlx-lm's own
        ``update_and_fetch`` leaves.

    Raises:
        ValueError: k and v differ in batch, heads or tokens.

    Source: mlx_lm.models.cache.
    """
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"kv_append: k is {k.shape}, v is {v.shape}, supported are equal")
    reason = supported(cache, k, policy)
    if reason is None:
        routes.fast("kv_append", "cpu")
        return cpu.kv_append(cache, k, v)
    routes.stock("kv_append", reason)
    return reference(cache, k, v)
