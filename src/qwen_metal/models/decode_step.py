"""One-token steps with the weights captured: what the blocks do, without reading modules again.

Reading every module and checking every call costs a small model more than its
kernels. A step is captured once, and holds the very arrays and modules it was
made from; before each use it compares them, by identity, with what the model
holds now, so that loading weights, adapters, fusing, sharding and training
mode are seen at the next token. ``capture`` refuses what has no fused path,
and the ordinary way through the blocks serves.
"""

from __future__ import annotations

from collections import Counter
from operator import is_
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache, KVCache

from .. import extension
from ..kernels import cpu
from ..ops.matrix import Matrix
from ..ops.moe_decode import MAX_ROWS
from ..policy import DEFAULT, Policy
from ..routes import Unsupported, count_step
from . import attention, deltanet, moe
from .state import check_plain, is_fused, norm_of, state_of

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

#: Policy fields that change what a one-token step runs.
FIELDS = (
    "kernels",
    "numerics",
    "compile_step",
    "fuse_gate_up",
    "fuse_down_combine",
    "fuse_qk_prepare",
    "fuse_delta_norm",
)

ATTRIBUTE = "_qwen_metal_step"


def logits(module: nn.Module, inputs: mx.array, cache: Optional[list]) -> Optional[mx.array]:
    """Logits (B, 1, V) of one more token a row, or None where this is no such step."""
    step = vars(module).get(ATTRIBUTE)
    if step is not None and not step.holds(module):
        # Dropped at any call, a prompt's too: it keeps the replaced weights in memory.
        step = None
        object.__delattr__(module, ATTRIBUTE)
    if cache is None or inputs.ndim != 2 or inputs.shape[1] != 1:
        return None
    if inputs.shape[0] > MAX_ROWS or mx.default_device() != mx.cpu:
        return None
    if step is None:
        step = capture(module)
        object.__setattr__(module, ATTRIBUTE, step)
    if step.layers is None or len(cache) != len(step.layers):
        return None
    if not all(map(_plain, cache)):
        return None
    # A gradient or vmap may enter by the caches as well.
    if step.ext.any_tracer([inputs, *map(_arrays, cache)]):
        return None
    count_step("cpu", step.calls)
    return step(inputs, cache)


def capture(module: nn.Module) -> "Step":
    """A step of this model, or one without layers where some part has no fused path."""
    step = Step(module)
    try:
        policy = state_of(module).policy
        if step.ext is None:
            raise Unsupported("no extension")
        if not isinstance(module, qwen3_5.TextModel) or not _captures(policy):
            raise Unsupported("another family, or another policy")
        for reason in (cpu.missing(op, policy) for op in OPS):
            if reason is not None:
                raise Unsupported(reason)
        if step.ext.any_tracer(step.arrays):
            raise Unsupported("inside a gradient")
        step.read(module)
    except Unsupported:
        step.layers = None
    return step


def _captures(policy: Policy) -> bool:
    """Whether a policy leaves the one-token step as it is captured."""
    return all(getattr(policy, f) == getattr(DEFAULT, f) for f in FIELDS)


def _fused(*modules: nn.Module) -> None:
    """Raise Unsupported where one of the modules is a user's own."""
    for module in modules:
        if not is_fused(module):
            raise Unsupported(f"a {type(module).__name__} is called as it is")


def _plain(cache: Any) -> bool:
    """Whether a layer's cache is of a class that a step moves on itself."""
    return type(cache) in (ArraysCache, KVCache)


def _own(module: nn.Module) -> tuple:
    """What the language model itself holds: settings, class, modules, attributes that are read."""
    tied = module.args.tie_word_embeddings
    return (state_of(module), type(module), module.training, module.args, tied, *module.values())


def _arrays(cache: Any) -> list:
    """What a plain cache holds."""
    return cache.cache if type(cache) is ArraysCache else [cache.keys, cache.values]


class Step:
    """The captured weights of a model and one token through them."""

    def __init__(self, module: nn.Module):
        self.ext = extension.load()
        self.layers: Optional[list] = None
        # Calls by operation, counted as the ordinary way through the blocks counts them.
        self.calls: Counter = Counter()
        # The model itself stays out: held from here it would never be freed, since the
        # garbage collector does not look into the extension.
        self.own = _own(module)
        holders: list = []
        # (dictionary or list, key, what stood there): modules hold their arrays and
        # children as dictionaries do; numbers and modes, such as top_k, in attributes.
        seen: list[tuple] = []
        for _, one in module.named_modules():
            lists = [value for value in one.values() if isinstance(value, list)]
            holders += lists
            seen += [(values, i, item) for values in lists for i, item in enumerate(values)]
            if one is not module:
                holders.append(one)
                seen += [(one, key, value) for key, value in one.items()]
                seen += [(vars(one), k, v) for k, v in vars(one).items() if k != "_no_grad"]
        self.arrays = [value for _, _, value in seen if isinstance(value, mx.array)]
        self.seen = None if self.ext is None else self.ext.Seen(holders, seen)

    def holds(self, module: nn.Module) -> bool:
        """Whether the model still holds what was captured."""
        own = _own(module)
        if len(own) != len(self.own) or not all(map(is_, own, self.own)):
            return False
        return self.seen is None or self.seen.holds()

    def __reduce__(self) -> tuple:
        """A copied or pickled model captures its own."""
        return type(None), ()

    def read(self, module: nn.Module) -> None:
        check_plain(module)
        body = module.model
        _fused(body, *body.layers)
        if body.pipeline_size > 1:
            raise Unsupported("a pipelined model")
        self.table = tuple(Matrix.of(body.embed_tokens))
        tied = module.args.tie_word_embeddings
        self.head = [self.table if tied else tuple(Matrix.of(module.lm_head))]
        self.norm = tuple(norm_of(body.norm))
        layers, calls = [], Counter(embed=1, projections=1)
        for layer in body.layers:
            _fused(layer.linear_attn if layer.is_linear else layer.self_attn, layer.mlp)
            if not isinstance(layer.mlp, moe.SparseMoe):
                raise Unsupported(f"a feed-forward block of type {type(layer.mlp).__name__}")
            mixer = _DeltaNet if layer.is_linear else _Attention
            layers.append((mixer(self.ext, layer), _Experts(self.ext, layer)))
            calls.update(mixer.CALLS)
            calls.update(_Experts.CALLS)
        self.layers, self.calls = layers, calls

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        x = self.ext.embed(inputs, self.table)
        for (mixer, experts), one in zip(self.layers, cache):
            x = experts(mixer(x, one))
        return self.ext.projections(x, self.head, self.norm, None, x.dtype)[0]


class _DeltaNet:
    CALLS = Counter(projections=2, gated_delta_step=1)

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
    CALLS = Counter(projections=2, attention_prepare=1, kv_append=1, gqa_decode=1)

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
    CALLS = Counter(projections=1, route_topk=1, moe_decode=1)

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
