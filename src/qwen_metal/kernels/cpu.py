"""The compiled CPU kernels, called through the optional extension."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import mlx.core as mx

from .. import extension
from ..policy import Policy


def missing(op: str, policy: Policy) -> Optional[str]:
    """None when the extension has a CPU kernel of ``op``, or why it cannot serve."""
    if policy.kernels == "stock":
        return "policy: kernels='stock'"
    if policy.numerics == "match":
        return "policy: numerics='match' rounds wherever mlx-lm rounds, as the stock path does"
    module = extension.load()
    if module is None:
        return extension.status().reason
    if mx.default_device() != mx.cpu:
        return "the default device is a GPU and this version has CPU kernels only"
    if not hasattr(module, op):
        return f"no CPU kernel of {op} in this version"
    return None


def _call(op: str, stock: Callable, arguments: Sequence[Any], fast: Callable) -> Any:
    """``fast(*arguments)``; where an argument is traced, with the gradient of ``stock``."""
    if not _ext().any_tracer(arguments):
        return fast(*arguments)
    from ..ops.gradient import stock_gradient

    return stock_gradient(fast, stock, arguments)


def _ext() -> Any:
    return extension.load()


def _float32(outputs: Sequence[mx.array], count: int) -> list[mx.array]:
    """The first ``count`` of the outputs as float32, which is what the kernels give."""
    return [o.astype(mx.float32) if i < count else o for i, o in enumerate(outputs)]


def embed(ids, table) -> mx.array:
    from ..ops.embed import reference
    from ..ops.matrix import Matrix

    def fast(ids, table):
        return _ext().embed(ids, tuple(table))

    def stock(ids, table):
        return reference(ids, Matrix(*table))

    return _call("embed", stock, [ids, table], fast)


def projections(x, matrices, norm, residual, dtype) -> list[mx.array]:
    from ..ops.matrix import Matrix, Norm
    from ..ops.projections import reference

    dtype = dtype or x.dtype

    def fast(x, matrices, norm, residual):
        return _ext().projections(x, _tuples(matrices), _tuple(norm), residual, dtype)

    def stock(x, matrices, norm, residual):
        ys = reference(
            x, [Matrix(*m) for m in matrices], norm and Norm(*norm), residual, numerics="match"
        )
        return [y.astype(dtype) for y in ys]

    return list(_call("projections", stock, [x, list(matrices), norm, residual], fast))


def route_topk(logits, top_k, normalise) -> tuple[mx.array, mx.array]:
    from ..ops.route_topk import reference

    def fast(logits):
        return _ext().route_topk(logits, top_k, normalise)

    def stock(logits):
        # Precise: in the kernel's order, so that gradients meet their own experts.
        return list(reference(logits, top_k, normalise))

    return tuple(_call("route_topk", stock, [logits], fast))


def route_plan(ids, num_experts, tile_rows):
    from ..ops.route_plan import Plan

    return Plan(*_ext().route_plan(ids, num_experts, tile_rows), ids.shape[-1], tile_rows)


def grouped_qmm(x, matrices, plan, scores) -> mx.array:
    from ..ops.grouped_qmm import reference
    from ..ops.matrix import Matrix

    def fast(x, matrices, scores):
        return _ext().grouped_qmm(
            x, _tuples(matrices), plan.order, plan.offsets, plan.top_k, scores
        )

    def stock(x, matrices, scores):
        y = reference(x, [Matrix(*m) for m in matrices], plan, scores, numerics="match")
        return y.astype(mx.float32)

    return _call("grouped_qmm", stock, [x, list(matrices), scores], fast)


def gather_sum(y, plan, shared, residual, dtype) -> mx.array:
    from ..ops.grouped_qmm import reference_gather_sum

    def fast(y, shared, residual):
        return _ext().gather_sum(y, plan.inverse, plan.top_k, shared, residual, dtype)

    def stock(y, shared, residual):
        return reference_gather_sum(y, plan, shared, residual, dtype)

    return _call("gather_sum", stock, [y, shared, residual], fast)


def moe_decode(x, experts, ids, scores, norm, shared, residual) -> mx.array:
    from ..ops.matrix import Matrix, Norm
    from ..ops.moe_decode import Experts, Shared, reference

    def fast(x, experts, ids, scores, norm, shared, residual):
        shared = shared and (*shared[:3], tuple(shared[3]))
        return _ext().moe_decode(
            x, _tuples(experts), ids, scores, _tuple(norm), shared, residual
        )

    def stock(x, experts, ids, scores, norm, shared, residual):
        experts = Experts(*(Matrix(*m) for m in experts))
        shared = shared and Shared(*shared[:3], Matrix(*shared[3]))
        y = reference(
            x, experts, ids, scores, norm and Norm(*norm), shared, residual, numerics="match"
        )
        return y.astype(x.dtype)

    return _call("moe_decode", stock, [x, experts, ids, scores, norm, shared, residual], fast)


def _tuple(fields: Optional[Sequence]) -> Optional[tuple]:
    """A NamedTuple again, where a tree of arrays has made a list of it."""
    return None if fields is None else tuple(fields)


def _tuples(matrices: Sequence) -> tuple:
    return tuple(map(tuple, matrices))


def gated_delta_prepare(qkv, a, b, conv_state, w, mask, lengths) -> tuple:
    from ..ops.gated_delta_prepare import reference

    def fast(qkv, a, b, conv_state, small, mask, lengths):
        return _ext().gated_delta_prepare(
            qkv, a, b, conv_state, w.of(small), mask, lengths
        )

    def stock(qkv, a, b, conv_state, small, mask, lengths):
        outputs = reference(
            qkv, a, b, conv_state, w.of(small), mask, lengths, numerics="match"
        )
        return _float32(outputs, 5)

    arguments = [qkv, a, b, conv_state, w.arrays, mask, lengths]
    return tuple(_call("gated_delta_prepare", stock, arguments, fast))


def gated_delta_scan(q, k, v, g, beta, state, mask) -> tuple:
    from ..ops.gated_delta_scan import stock as of_mlx_lm

    def stock(*arguments):
        return _float32(of_mlx_lm(*arguments), 2)

    arguments = [q, k, v, g, beta, state, mask]
    return tuple(_call("gated_delta_scan", stock, arguments, _ext().gated_delta_scan))


def gated_delta_step(qkv, z, b, a, conv_state, state, w, left_padding, lengths) -> tuple:
    from ..ops.gated_delta_step import reference

    def fast(qkv, z, b, a, conv_state, state, small, left_padding, lengths):
        return _ext().gated_delta_step(
            qkv, z, b, a, conv_state, state, w.of(small), left_padding, lengths
        )

    def stock(qkv, z, b, a, conv_state, state, small, left_padding, lengths):
        return reference(
            qkv, z, b, a, conv_state, state, w.of(small), left_padding, lengths, numerics="match"
        )

    arguments = [qkv, z, b, a, conv_state, state, w.arrays, left_padding, lengths]
    return tuple(_call("gated_delta_step", stock, arguments, fast))


def gated_norm(y, z, norm, dtype) -> mx.array:
    from ..ops.gated_norm import reference

    dtype = dtype or y.dtype

    def fast(y, z, weight):
        return _ext().gated_norm(y, z, weight, norm.eps, dtype)

    def stock(y, z, weight):
        own = norm._replace(weight=weight)
        return reference(y, z, own, dtype, numerics="match").astype(dtype)

    return _call("gated_norm", stock, [y, z, norm.weight], fast)


def attention_prepare(
    q, k, v, q_norm, k_norm, rope, num_heads, num_kv_heads, offset, gated
) -> tuple:
    from ..ops.attention_prepare import reference

    def fast(q, k, v, q_weight, k_weight, offset):
        return _ext().attention_prepare(
            q, k, v, q_weight, k_weight, q_norm.eps, k_norm.eps, rope.dims, rope.base,
            rope.scale, num_heads, num_kv_heads, offset, gated,
        )  # fmt: skip

    def stock(q, k, v, q_weight, k_weight, offset):
        norms = q_norm._replace(weight=q_weight), k_norm._replace(weight=k_weight)
        outputs = reference(
            q, k, v, *norms, rope, num_heads, num_kv_heads, offset, gated, numerics="match"
        )
        return list(outputs if gated else outputs[:3])

    arguments = [q, k, v, q_norm.weight, k_norm.weight, offset]
    outputs = _call("attention_prepare", stock, arguments, fast)
    return tuple(outputs) if gated else (*outputs, None)


def kv_append(cache, k, v) -> tuple:
    """The caches' own bookkeeping, with the rows written in place."""
    from mlx_lm.models.cache import QuantizedKVCache

    T, place = k.shape[2], "_idx" if hasattr(cache, "_idx") else "offset"
    previous = getattr(cache, place)
    room = None if cache.keys is None else _first(cache.keys).shape[2]
    if room is None or previous + T > room:
        # New room every 256 tokens: mlx-lm's own growth, which copies.
        return cache.update_and_fetch(k, v)
    if isinstance(cache, QuantizedKVCache):
        k = mx.quantize(k, group_size=cache.group_size, bits=cache.bits)
        v = mx.quantize(v, group_size=cache.group_size, bits=cache.bits)
        buffers = _ext().kv_append([*cache.keys, *cache.values], [*k, *v], previous)
        cache.keys, cache.values = tuple(buffers[:3]), tuple(buffers[3:])
    else:
        cache.keys, cache.values = _ext().kv_append([cache.keys, cache.values], [k, v], previous)
    if place == "_idx":
        cache._idx += T
    cache.offset = cache.offset + T
    return cache.keys_and_values()


def _first(keys: Any) -> mx.array:
    return keys if isinstance(keys, mx.array) else keys[0]


def gqa_decode(q, keys, values, scale, start, gate, quantised) -> mx.array:
    from ..ops.gqa_decode import mask_of, reference

    def fast(q, keys, values, start, gate):
        return _ext().gqa_decode(q, keys, values, scale, start, gate, quantised)

    def stock(q, keys, values, start, gate):
        mask = mask_of(start, _first(keys).shape[2])
        return reference(q, keys, values, scale, mask, gate, quantised, numerics="match")

    return _call("gqa_decode", stock, [q, keys, values, start, gate], fast)


def attention_prefill(q, keys, values, scale, start, causal, gate, quantised) -> mx.array:
    from ..ops.attention_prefill import mask_of, reference

    def fast(q, keys, values, start, gate):
        return _ext().attention_prefill(
            q, keys, values, scale, start, causal, gate, quantised
        )

    def stock(q, keys, values, start, gate):
        mask = mask_of(start, q.shape[2], _first(keys).shape[2], "causal" if causal else None)
        return reference(q, keys, values, scale, mask, gate, quantised, numerics="match")

    return _call("attention_prefill", stock, [q, keys, values, start, gate], fast)
