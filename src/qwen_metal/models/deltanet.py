"""The Gated DeltaNet block: projections, recurrence, output projection."""

from __future__ import annotations

from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.base import create_ssm_mask

from .. import routes
from ..ops.gated_delta_chunk import gated_delta_chunk
from ..ops.gated_delta_prepare import DeltaWeights, gated_delta_prepare
from ..ops.gated_delta_scan import gated_delta_scan
from ..ops.gated_delta_step import gated_delta_step
from ..ops.gated_norm import gated_norm
from ..ops.matrix import Matrix, Norm
from ..ops.projections import projections
from ..routes import Unsupported
from .state import FROM_CACHE, check_plain, norm_of, state_of, stock_class


class GatedDeltaNet(qwen3_5.GatedDeltaNet):
    """Fused Gated DeltaNet of Qwen3.5."""

    def __call__(self, inputs, mask=None, cache=None) -> mx.array:
        return gated_delta_net(self, inputs, mask=mask, cache=cache)


class InterleavedGatedDeltaNet(qwen3_next.Qwen3NextGatedDeltaNet):
    """Fused Gated DeltaNet of Qwen3-Next, its projections interleaved by key head."""

    def __call__(self, inputs, mask=None, cache=None) -> mx.array:
        return gated_delta_net(self, inputs, mask=mask, cache=cache)


def gated_delta_net(
    block: nn.Module,
    x: mx.array,
    norm: Optional[nn.Module] = None,
    residual: Optional[mx.array] = None,
    mask: Any = FROM_CACHE,
    cache: Any = None,
) -> mx.array:
    """``residual + block(norm(x))`` for x (B, T, D), fused where possible.

    ``mask`` (B, T) bool as mlx-lm passes it, or FROM_CACHE: the cache's left
    padding and lengths go to the operations instead.
    """
    state = state_of(block)
    with routes.strict(state.strict):
        try:
            folded, first, out, weights = read(block, norm)
        except Unsupported as error:
            routes.stock("deltanet", str(error))
            if mask is FROM_CACHE:
                mask = create_ssm_mask(x, cache)
            h = x if norm is None else norm(x)
            y = stock_class(block).__call__(block, h, mask, cache)
            return y if residual is None else residual + y
        policy = state.policy
        parts = projections(x, first, folded, policy=policy)
        qkv, z, b, a = _ordered(block, parts)
        y = _recurrence(qkv, z, b, a, weights, mask, cache, policy)
        return projections(y, [out], residual=residual, policy=policy)[0]


def _recurrence(qkv, z, b, a, w, mask, cache, policy) -> mx.array:
    """Everything between the projections; moves the cache on as mlx-lm does."""
    B, T, _ = qkv.shape
    conv_state = state = lengths = None
    if cache is not None:
        conv_state, state, lengths = cache[0], cache[1], cache.lengths
    if T == 1 and mask is FROM_CACHE and policy.fuse_delta_norm:
        padding = None if cache is None else cache.left_padding
        y, conv_state, state = gated_delta_step(
            qkv, z, b, a, conv_state, state, w, padding, lengths, policy
        )
    else:
        if mask is FROM_CACHE:
            mask = create_ssm_mask(qkv, cache)
        q, k, v, g, beta, conv_state = gated_delta_prepare(
            qkv, a, b, conv_state, w, mask, lengths, policy
        )
        scan = gated_delta_chunk if policy.delta_scan == "chunk" else gated_delta_scan
        y, state = scan(q, k, v, g, beta, state, mask, policy)
        y = gated_norm(
            y, z.reshape(y.shape), Norm(w.norm, w.eps), qkv.dtype, policy
        ).reshape(B, T, -1)
    if cache is not None:
        cache[0], cache[1] = conv_state, state
        cache.advance(T)
    return y


def read(block: nn.Module, norm: Optional[nn.Module] = None) -> tuple:
    """The block's weights as its modules hold them now.

    Raises:
        Unsupported: a layer or mode the fused path does not know.
    """
    check_plain(block)
    folded = None if norm is None else norm_of(norm)
    if _interleaved(block):
        names = ("in_proj_qkvz", "in_proj_ba")
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    conv = block.conv1d
    if type(conv) is not nn.Conv1d or "bias" in conv:
        raise Unsupported("a convolution other than a plain Conv1d without bias")
    weights = DeltaWeights(
        conv["weight"],
        block["A_log"],
        block["dt_bias"],
        block.norm["weight"],
        block.num_k_heads,
        block.num_v_heads,
        block.head_k_dim,
        block.head_v_dim,
        block.norm.eps,
    )
    return folded, [Matrix.of(block[n]) for n in names], Matrix.of(block.out_proj), weights


def _ordered(block: nn.Module, parts: list[mx.array]) -> tuple:
    """qkv, z, b, a with heads in order; Qwen3-Next interleaves them by key head."""
    if not _interleaved(block):
        return tuple(parts)
    q, k, v, z, b, a = block.fix_query_key_value_ordering(*parts)
    B, T = q.shape[:2]
    qkv = mx.concatenate([t.reshape(B, T, -1) for t in (q, k, v)], axis=-1)
    return qkv, z.reshape(B, T, -1), b, a


def _interleaved(block: nn.Module) -> bool:
    """Whether the block is Qwen3-Next's, stock or fused."""
    return isinstance(block, qwen3_next.Qwen3NextGatedDeltaNet)
