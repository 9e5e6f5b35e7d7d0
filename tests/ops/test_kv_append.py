"""kv_append leaves every field of a cache as mlx-lm's own update does, and copies no buffer."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as caches
from sequence_cases import DTYPES, normal

from qwen_metal.ops.kv_append import kv_append
from qwen_metal.routes import routes

FAST = {
    "plain": caches.KVCache,
    "8-bit": lambda: caches.QuantizedKVCache(64, 8),
    "4-bit": lambda: caches.QuantizedKVCache(32, 4),
    "batch": lambda: caches.BatchKVCache([0, 3]),
}
STOCK = {
    "rotating": lambda: caches.RotatingKVCache(64),
    "chunked": lambda: caches.ChunkedKVCache(64),
    "concatenated": caches.ConcatenateKVCache,
}


def fields(cache):
    return tree_flatten({k: v for k, v in vars(cache).items()})


def same(a, b):
    if isinstance(a, mx.array):
        return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b))
    return a == b


@pytest.mark.parametrize("make", [*FAST, *STOCK])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fields_are_mlx_lm_s(make, dtype):
    make = {**FAST, **STOCK}[make]
    ours, stock = make(), make()
    for step, T in enumerate((5, 1, 1, 249, 1, 1, 300, 1)):
        k, v = (normal(10 * step + i, 2, 2, T, 64, dtype=dtype) for i in range(2))
        got, wanted = kv_append(ours, k, v), stock.update_and_fetch(k, v)
        for a, b in zip(tree_flatten(list(got)), tree_flatten(list(wanted))):
            assert same(a[1], b[1])
        for (name, a), (_, b) in zip(fields(ours), fields(stock)):
            assert same(a, b), name
    if getattr(ours, "is_trimmable", lambda: False)():
        assert ours.trim(3) == stock.trim(3)
        k, v = (normal(i, 2, 2, 1, 64, dtype=dtype) for i in range(2))
        for a, b in zip(tree_flatten(list(kv_append(ours, k, v))), tree_flatten(list(stock.update_and_fetch(k, v)))):
            assert same(a[1], b[1])


def test_which_route_served():
    k = normal(1, 1, 1, 1, 64)
    routes(reset=True)
    kv_append(caches.KVCache(), k, k)
    kv_append(caches.RotatingKVCache(8), k, k)
    counts = routes(reset=True)["kv_append"]
    assert counts["cpu"] == counts["stock"] == 1
    assert "RotatingKVCache" in next(iter(counts["reasons"]))


def test_no_buffer_is_copied_while_a_step_is_still_at_work():
    """The step before holds the buffer it reads; the append waits for it instead of copying."""
    cache = caches.KVCache()
    k = normal(1, 1, 2, 4000, 256)
    kv_append(cache, k, k)
    mx.eval(cache.keys, cache.values)
    del k
    place = lambda: np.array(cache.keys, copy=False).__array_interface__["data"][0]  # noqa: E731
    first, one = place(), normal(2, 1, 2, 1, 256)
    for _ in range(6):
        keys, values = kv_append(cache, one, one)
        busy = (keys.swapaxes(2, 3) @ values).sum()  # a long read of the buffer
        mx.async_eval(busy)
        del keys, values
    mx.eval(busy)
    assert place() == first


def test_a_fork_keeps_its_own_rows():
    cache = caches.KVCache()
    k = normal(1, 1, 1, 5, 64)
    kv_append(cache, k, k)
    mx.eval(cache.keys, cache.values)
    fork = copy.deepcopy(cache)
    held = cache.keys
    a, b = normal(2, 1, 1, 1, 64), normal(3, 1, 1, 1, 64)
    ours, _ = kv_append(cache, a, a)
    theirs, _ = kv_append(fork, b, b)
    mx.eval(ours, theirs)
    assert mx.array_equal(ours[:, :, 5:], a) and mx.array_equal(theirs[:, :, 5:], b)
    assert not mx.array_equal(held[:, :, 5:6], a)


def test_wrong_shapes():
    cache = caches.KVCache()
    with pytest.raises(ValueError):
        kv_append(cache, normal(1, 1, 2, 3, 64), normal(1, 1, 2, 4, 64))
    kv_append(cache, normal(1, 1, 2, 3, 64), normal(1, 1, 2, 3, 64))
    with pytest.raises(ValueError):
        kv_append(cache, normal(1, 1, 3, 3, 64), normal(1, 1, 3, 3, 64))
