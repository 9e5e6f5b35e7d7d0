"""One-token steps with the weights captured: what the blocks do, without reading modules again.

Reading every module and checking every call costs a small model more than its
kernels. A step is captured once, and holds the very arrays and modules it was
made from; before each use it compares them, by identity, with what the model
holds now, so that loading weights, adapters, fusing, sharding and training
mode are seen at the next token. ``capture`` refuses what has no fused path,
and the ordinary way through the blocks serves.
"""

from __future__ import annotations

from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache, KVCache

from .. import extension, routes
from ..kernels import cpu
from ..ops.matrix import Matrix
from ..ops.moe_decode import MAX_ROWS
from ..policy import DEFAULT
from ..routes import Unsupported
from . import attention, deltanet, moe
from .state import check_plain, norm_of, state_of

#: The operations of a step; each must have a kernel.
OPS = (
    "embed",
    "projections",
    "gated_delta_step",
    "attention_prepare",
    "kv_append",
    "gqa_decode",
    "route_topk",
    "moe_decode",
)

ATTRIBUTE = "_qwen_metal_step"


def logits(module: nn.Module, inputs: mx.array, cache: Optional[list]) -> Optional[mx.array]:
    """Logits (B, 1, V) of one more token a row, or None where this is no such step."""
    if cache is None or inputs.ndim != 2 or inputs.shape[1] != 1:
        return None
    if inputs.shape[0] > MAX_ROWS or mx.default_device() != mx.cpu:
        return None
    step = vars(module).get(ATTRIBUTE)
    if step is None or not step.holds():
        step = capture(module)
        object.__setattr__(module, ATTRIBUTE, step)
    if step.layers is None or len(cache) != len(step.layers):
        return None
    if step.ext.any_tracer(inputs) or not all(map(_plain, cache)):
        return None
    routes.fast("decode_step", "cpu")
    return step(inputs, cache)


def capture(module: nn.Module) -> "Step":
    """A step of this model, or one without layers where some part has no fused path."""
    step = Step(module)
    try:
        policy = state_of(module).policy
        if not isinstance(module, qwen3_5.TextModel) or policy != DEFAULT:
            raise Unsupported("another family, or another policy")
        for reason in (cpu.missing(op, policy) for op in OPS):
            if reason is not None:
                raise Unsupported(reason)
        if step.ext.any_tracer([v for _, _, v in step.seen if isinstance(v, mx.array)]):
            raise Unsupported("inside a gradient")
        step.read(module)
    except Unsupported:
        step.layers = None
    return step


def _plain(cache: Any) -> bool:
    """Whether a layer's cache is of a class that a step moves on itself."""
    return type(cache) in (ArraysCache, KVCache)


class Step:
    """The captured weights of a model and one token through them."""

    def __init__(self, module: nn.Module):
        self.ext = extension.load()
        self.layers: Optional[list] = None
        # (dictionary or list, key, what stood there): modules hold their arrays
        # and children as dictionaries do, and modes in their attributes.
        self.seen: list[tuple] = []
        for _, one in module.named_modules():
            self.seen += [(one, key, value) for key, value in one.items()]
            own = vars(one)
            self.seen += [(own, k, own[k]) for k in ("_training", "sharding_group") if k in own]
            for value in one.values():
                if isinstance(value, list):
                    self.seen += [(value, i, item) for i, item in enumerate(value)]
        self.state = state_of(module)
        self.module = module

    def holds(self) -> bool:
        """Whether the model still holds what was captured."""
        if state_of(self.module) is not self.state:
            return False
        try:
            return all(held[key] is value for held, key, value in self.seen)
        except (KeyError, IndexError):
            return False

    def read(self, module: nn.Module) -> None:
        check_plain(module)
        body = module.model
        if body.pipeline_size > 1:
            raise Unsupported("a pipelined model")
        self.table = tuple(Matrix.of(body.embed_tokens))
        tied = module.args.tie_word_embeddings
        self.head = [self.table if tied else tuple(Matrix.of(module.lm_head))]
        self.norm = tuple(norm_of(body.norm))
        layers = []
        for layer in body.layers:
            if not isinstance(layer.mlp, moe.SparseMoe):
                raise Unsupported(f"a feed-forward block of type {type(layer.mlp).__name__}")
            mixer = _DeltaNet if layer.is_linear else _Attention
            layers.append((mixer(self.ext, layer), _Experts(self.ext, layer)))
        self.layers = layers

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        x = self.ext.embed(inputs, self.table)
        for (mixer, experts), one in zip(self.layers, cache):
            x = experts(mixer(x, one))
        return self.ext.projections(x, self.head, self.norm, None, x.dtype)[0]


class _DeltaNet:
    def __init__(self, ext: Any, layer: nn.Module):
        norm, first, out, self.weights = deltanet.read(layer.linear_attn, layer.input_layernorm)
        self.ext, self.norm = ext, tuple(norm)
        self.first, self.out = [tuple(m) for m in first], [tuple(out)]

    def __call__(self, x: mx.array, cache: ArraysCache) -> mx.array:
        ext, arrays = self.ext, cache.cache
        parts = ext.projections(x, self.first, self.norm, None, x.dtype)
        y, arrays[0], arrays[1] = ext.gated_delta_step(
            *parts, arrays[0], arrays[1], self.weights, cache.left_padding, cache.lengths
        )
        cache.advance(1)
        return ext.projections(y, self.out, None, x, x.dtype)[0]


class _Attention:
    def __init__(self, ext: Any, layer: nn.Module):
        block = layer.self_attn
        norm, first, out, norms, rope = attention.read(block, layer.input_layernorm)
        if rope.base is None:
            raise Unsupported("a rotary embedding without a kernel")
        if norms[0].weight.shape[0] % 16:
            raise Unsupported("a head size without a kernel")
        self.ext, self.norm, self.scale = ext, tuple(norm), block.scale
        self.first, self.out = [tuple(m) for m in first], [tuple(out)]
        (q_norm, q_eps), (k_norm, k_eps) = norms
        heads = block.num_attention_heads, block.num_key_value_heads
        self.prepare = (q_norm, k_norm, q_eps, k_eps, rope.dims, rope.base, rope.scale, *heads)

    def __call__(self, x: mx.array, cache: KVCache) -> mx.array:
        ext = self.ext
        parts = ext.projections(x, self.first, self.norm, None, x.dtype)
        q, k, v, gate = ext.attention_prepare(*parts, *self.prepare, cache.offset, True)
        keys, values = cpu.kv_append(cache, k, v)
        o = ext.gqa_decode(q, keys, values, self.scale, None, gate, None)
        return ext.projections(o, self.out, None, x, x.dtype)[0]


class _Experts:
    def __init__(self, ext: Any, layer: nn.Module):
        block = layer.mlp
        norm, first, experts, shared = moe.read(block, layer.post_attention_layernorm)
        if shared is None:
            raise Unsupported("no shared expert")
        self.ext, self.norm = ext, tuple(norm)
        self.first, self.shared = [tuple(m) for m in first], tuple(shared)
        self.experts = tuple(map(tuple, experts))
        self.top_k, self.normalise = block.top_k, block.norm_topk_prob

    def __call__(self, x: mx.array) -> mx.array:
        ext, shape = self.ext, x.shape
        rows = x.reshape(shape[0], shape[2])
        scores, *shared = ext.projections(rows, self.first, self.norm, None, mx.float32)
        ids, scores = ext.route_topk(scores, self.top_k, self.normalise)
        y = ext.moe_decode(
            rows, self.experts, ids, scores, self.norm, (*shared, self.shared), rows
        )
        return y.reshape(shape)
