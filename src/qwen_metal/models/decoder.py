"""The decoder: embedding, layers, final norm and head, for all four families."""

from __future__ import annotations

from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_moe, qwen3_next
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, QuantizedKVCache

from .. import routes
from ..ops.embed import embed
from ..ops.matrix import Matrix
from ..ops.projections import projections
from ..routes import Unsupported
from . import decode_step
from .attention import GatedAttention, PlainAttention, attention
from .deltanet import GatedDeltaNet, InterleavedGatedDeltaNet, gated_delta_net
from .moe import Mlp, PlainMlp, PlainSparseMoe, SparseMoe, feed_forward
from .state import FROM_CACHE, check_plain, is_fused, norm_of, state_of, stock_class

#: Caches whose state carries over a prompt cut anywhere.
CHUNKABLE = (KVCache, QuantizedKVCache, BatchKVCache, ArraysCache)


class Layer(qwen3_5.DecoderLayer):
    """Fused decoder layer of Qwen3.5."""

    def __call__(self, x, mask=None, cache=None) -> mx.array:
        return layer(self, x, mask, cache)


class NextLayer(qwen3_next.Qwen3NextDecoderLayer):
    """Fused decoder layer of Qwen3-Next."""

    def __call__(self, x, mask=None, cache=None) -> mx.array:
        return layer(self, x, mask, cache)


class MoeLayer(qwen3_moe.Qwen3MoeDecoderLayer):
    """Fused decoder layer of Qwen3-MoE."""

    def __call__(self, x, mask=None, cache=None) -> mx.array:
        return layer(self, x, mask, cache)


class Body(qwen3_5.Qwen3_5TextModel):
    """Fused body (all but the head) of Qwen3.5."""

    def __call__(self, inputs, cache=None, input_embeddings=None) -> mx.array:
        return body(self, inputs, cache, input_embeddings)


class NextBody(qwen3_next.Qwen3NextModel):
    """Fused body of Qwen3-Next."""

    def __call__(self, inputs, cache=None) -> mx.array:
        return body(self, inputs, cache)


class MoeBody(qwen3_moe.Qwen3MoeModel):
    """Fused body of Qwen3-MoE."""

    def __call__(self, inputs, cache=None, input_embeddings=None) -> mx.array:
        return body(self, inputs, cache, input_embeddings)


class Text(qwen3_5.TextModel):
    """Fused language model (body and head) of Qwen3.5."""

    def __call__(self, inputs, cache=None, input_embeddings=None) -> mx.array:
        return language_model(self, inputs, cache, input_embeddings)


class NextText(qwen3_next.Model):
    """Fused language model of Qwen3-Next."""

    def __call__(self, inputs, cache=None) -> mx.array:
        return language_model(self, inputs, cache)


class MoeText(qwen3_moe.Model):
    """Fused language model of Qwen3-MoE."""

    def __call__(self, inputs, cache=None, input_embeddings=None) -> mx.array:
        return language_model(self, inputs, cache, input_embeddings)


#: mlx-lm's class -> the fused class that takes its place on a module.
FUSED = {
    fused.__mro__[1]: fused
    for fused in (
        Layer, NextLayer, MoeLayer,
        Body, NextBody, MoeBody,
        Text, NextText, MoeText,
        GatedDeltaNet, InterleavedGatedDeltaNet,
        GatedAttention, PlainAttention,
        SparseMoe, PlainSparseMoe, Mlp, PlainMlp,
    )
}

BODIES = (Body, NextBody, MoeBody)


def layer(module: nn.Module, x: mx.array, mask: Any, cache: Any) -> mx.array:
    """One decoder layer on x (B, T, D); ``mask`` as mlx-lm's, or FROM_CACHE."""
    norm, linear = module.input_layernorm, _is_linear(module)
    block = module.linear_attn if linear else module.self_attn
    if is_fused(block):
        h = (gated_delta_net if linear else attention)(block, x, norm, x, mask, cache)
    else:
        routes.stock("deltanet" if linear else "attention", _own_class(block))
        h = x + block(norm(x), _stock_mask(module, x, mask, cache), cache)
    norm, block = module.post_attention_layernorm, module.mlp
    if is_fused(block):
        return feed_forward(block, h, norm, h)
    routes.stock("moe", _own_class(block))
    return h + block(norm(h))


def _own_class(block: Any) -> str:
    """The reason why a module that is not ours, a user's own, is called as it is."""
    return f"a {type(block).__name__} is called as it is"


def _is_linear(module: Any) -> bool:
    """Whether a layer is a Gated DeltaNet one; Qwen3-MoE's layers do not say."""
    return getattr(module, "is_linear", False)


def _stock_mask(module: Any, x: mx.array, mask: Any, cache: Any) -> Any:
    """The mask mlx-lm would pass to a layer or its block."""
    if mask is not FROM_CACHE:
        return mask
    return (create_ssm_mask if _is_linear(module) else create_attention_mask)(x, cache)


def hidden(
    module: nn.Module,
    inputs: mx.array,
    cache: Optional[list],
    input_embeddings: Optional[mx.array] = None,
) -> mx.array:
    """The body's output before its final norm (B, T, D)."""
    policy = state_of(module).policy
    if input_embeddings is not None:
        x = input_embeddings
    else:
        x = _embedded(module.embed_tokens, inputs, policy)
    layers = module.pipeline_layers
    if cache is None:
        cache = [None] * len(layers)
    step, length = policy.prefill_chunk, x.shape[1]
    if 0 < step < length and all(type(c) in CHUNKABLE for c in cache):
        pieces = [x[:, i : i + step] for i in range(0, length, step)]
    else:
        pieces = [x]
    outputs = []
    for piece in pieces:
        for one, c in zip(layers, cache):
            if is_fused(one):
                piece = layer(one, piece, FROM_CACHE, c)
            else:
                routes.stock("layer", _own_class(one))
                mask = _stock_mask(one, piece, FROM_CACHE, c)
                piece = one(piece, mask=mask, cache=c)
        outputs.append(piece)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def body(module, inputs, cache=None, input_embeddings=None) -> mx.array:
    """The body with its final norm (B, T, D)."""
    state = state_of(module)
    with routes.strict(state.strict):
        if module.pipeline_size > 1 or module.training:
            # The pieces between the ranks, and gradient checkpoints (which replace
            # a layer's __call__), are mlx-lm's; the layers that it calls are ours.
            extra = () if isinstance(module, NextBody) else (input_embeddings,)
            return stock_class(module).__call__(module, inputs, cache, *extra)
        return module.norm(hidden(module, inputs, cache, input_embeddings))


def language_model(module, inputs, cache=None, input_embeddings=None) -> mx.array:
    """Logits (B, T, V): the final norm folded into the head."""
    state = state_of(module)
    with routes.strict(state.strict):
        if input_embeddings is None:
            step = decode_step.logits(module, inputs, cache)
            if step is not None:
                return step
        inner = module.model
        try:
            check_plain(module)
            if not is_fused(inner):
                raise Unsupported(_own_class(inner))
            if inner.pipeline_size > 1:
                raise Unsupported("a pipelined model takes the stock path")
            tied = module.args.tie_word_embeddings
            head = Matrix.of(inner.embed_tokens if tied else module.lm_head)
            norm = norm_of(inner.norm)
        except Unsupported as error:
            routes.stock("head", str(error))
            extra = () if isinstance(module, NextText) else (input_embeddings,)
            return stock_class(module).__call__(module, inputs, cache, *extra)
        x = hidden(inner, inputs, cache, input_embeddings)
        return projections(x, [head], norm, policy=state.policy)[0]


def _embedded(table: nn.Module, inputs: mx.array, policy) -> mx.array:
    """Embedding rows (B, T, D), by the stock module where it is of another kind."""
    try:
        check_plain(table)
        return embed(inputs, Matrix.of(table), policy)
    except Unsupported as error:
        routes.stock("embed", str(error))
        return table(inputs)
