"""The feed-forward block: router, experts, shared expert; or a dense MLP."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_moe, qwen3_next
from mlx_lm.models.activations import swiglu
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from .. import routes
from ..ops.grouped_qmm import gather_sum, grouped_qmm
from ..ops.matrix import Matrix, Norm, rms_norm
from ..ops.moe_decode import MAX_ROWS, Experts, Shared, moe_decode
from ..ops.projections import projections
from ..ops.route_plan import plan_on_host, route_plan
from ..ops.route_topk import route_topk
from ..routes import Unsupported
from .state import check_plain, norm_of, state_of, stock_class


class SparseMoe(qwen3_next.Qwen3NextSparseMoeBlock):
    """Fused MoE block of Qwen3.5-MoE and Qwen3-Next (with a shared expert)."""

    def __call__(self, x: mx.array) -> mx.array:
        return feed_forward(self, x)


class PlainSparseMoe(qwen3_moe.Qwen3MoeSparseMoeBlock):
    """Fused MoE block of Qwen3-MoE (no shared expert)."""

    def __call__(self, x: mx.array) -> mx.array:
        return feed_forward(self, x)


class Mlp(qwen3_next.Qwen3NextMLP):
    """Fused dense MLP of Qwen3.5 and Qwen3-Next."""

    def __call__(self, x: mx.array) -> mx.array:
        return feed_forward(self, x)


class PlainMlp(qwen3_moe.MLP):
    """Fused dense MLP of Qwen3-MoE."""

    def __call__(self, x: mx.array) -> mx.array:
        return feed_forward(self, x)


def feed_forward(
    block: nn.Module,
    x: mx.array,
    norm: Optional[nn.Module] = None,
    residual: Optional[mx.array] = None,
) -> mx.array:
    """``residual + block(norm(x))`` for x (B, T, D), fused where possible.

    ``norm`` is the layer's RMSNorm module, or None where x is normalised.
    """
    state = state_of(block)
    with routes.strict(state.strict):
        try:
            weights = read(block, norm)
        except Unsupported as error:
            routes.stock("moe", str(error))
            y = stock_class(block).__call__(block, x if norm is None else norm(x))
            return y if residual is None else residual + y
        rows = x.reshape(-1, x.shape[-1])
        kept = None if residual is None else residual.reshape(rows.shape)
        if _is_sparse(block):
            y = _sparse(block, rows, weights, kept, state.policy)
        else:
            y = _dense(rows, weights, kept, state.policy)
        return y.reshape(x.shape)


def read(block: nn.Module, norm: Optional[nn.Module] = None) -> tuple:
    """The block's weights as its modules hold them now.

    Raises:
        Unsupported: a layer, activation or mode the fused path does not know.
    """
    check_plain(block)
    folded = None if norm is None else norm_of(norm)
    if not _is_sparse(block):
        dense = (Matrix.of(block[n]) for n in ("gate_proj", "up_proj", "down_proj"))
        return (folded, *dense)
    switch = block.switch_mlp
    if type(switch) is not SwitchGLU or type(switch.activation) is not SwiGLU:
        raise Unsupported(f"experts of type {type(switch).__name__}")
    experts = Experts(*(Matrix.of(switch[n]) for n in ("gate_proj", "up_proj", "down_proj")))
    first, down = [Matrix.of(block.gate)], None
    if "shared_expert" in block:
        shared = block.shared_expert
        check_plain(shared)
        first += [Matrix.of(block.shared_expert_gate)]
        first += [Matrix.of(shared[n]) for n in ("gate_proj", "up_proj")]
        down = Matrix.of(shared.down_proj)
    return folded, first, experts, down


def _sparse(block, x, weights, residual, policy) -> mx.array:
    """MoE of rows (R, D)."""
    norm, first, experts, shared_down = weights
    if x.shape[0] == 0:
        return x
    # The unfused controls have no one-launch form, so they take the grouped path.
    fused = policy.fuse_gate_up and policy.fuse_down_combine
    decode = x.shape[0] <= MAX_ROWS and fused
    if not decode:
        x, norm = _normalised(x, norm), None
    logits, *shared_in = projections(x, first, norm, dtype=mx.float32, policy=policy)
    ids, scores = route_topk(logits, block.top_k, block.norm_topk_prob, policy)
    if decode:
        shared = Shared(*shared_in, shared_down) if shared_in else None
        return moe_decode(x, experts, ids, scores, norm, shared, residual, policy)
    shared = None
    if shared_in:
        gate_logit, gate, up = shared_in
        shared = projections(swiglu(gate, up), [shared_down], policy=policy)[0]
        shared = mx.sigmoid(gate_logit) * shared
    return _grouped(x, experts, ids, scores, shared, residual, policy)


def _grouped(x, experts, ids, scores, shared, residual, policy) -> mx.array:
    """Routed experts of many rows (R, D), and the sum over a token's experts."""
    make_plan = plan_on_host if policy.routing == "host" else route_plan
    plan = make_plan(ids, experts.gate.weight.shape[0], policy.tile_rows or 32, policy)
    if policy.expert_weights == "array":
        experts = Experts(*(Matrix(m.dequantised(x.dtype), bias=m.bias) for m in experts))
    if policy.fuse_gate_up:
        activation = grouped_qmm(x, (experts.gate, experts.up), plan, policy=policy)
    else:
        parts = [grouped_qmm(x, (m,), plan, policy=policy) for m in experts[:2]]
        activation = swiglu(*parts)
    if policy.fuse_down_combine:
        y = grouped_qmm(activation, (experts.down,), plan, scores, policy)
        return gather_sum(y, plan, shared, residual, x.dtype, policy)
    y = grouped_qmm(activation, (experts.down,), plan, policy=policy)
    y = y * scores.reshape(-1)[plan.order][:, None]
    y = gather_sum(y, plan, policy=policy)
    y = y if shared is None else y + shared
    return (y if residual is None else residual + y).astype(x.dtype)


def _dense(x, weights, residual, policy) -> mx.array:
    """Dense MLP of rows (R, D)."""
    norm, gate, up, down = weights
    h = projections(x, [gate, up], norm, policy=policy)
    return projections(swiglu(*h), [down], residual=residual, policy=policy)[0]


def _normalised(x: mx.array, norm: Optional[Norm]) -> mx.array:
    """Rows normalised once, for the many matrices of a prefill."""
    return rms_norm(x, norm, "match")


def _is_sparse(block: nn.Module) -> bool:
    """Whether the block routes to experts, stock or fused."""
    kinds = (qwen3_next.Qwen3NextSparseMoeBlock, qwen3_moe.Qwen3MoeSparseMoeBlock)
    return isinstance(block, kinds)
