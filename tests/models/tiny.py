"""Tiny randomly initialised models of each family, for tests of the wiring."""

from __future__ import annotations

import importlib

import mlx.core as mx
import mlx.nn as nn

COMMON = dict(
    hidden_size=64,
    num_hidden_layers=4,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    vocab_size=128,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    decoder_sparse_step=1,
)
LINEAR = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    full_attention_interval=4,
    shared_expert_intermediate_size=64,
)
ROPE = dict(type="default", rope_theta=10000.0, partial_rotary_factor=0.25)

CONFIGS = {
    "qwen3_5_moe": dict(
        model_type="qwen3_5_moe",
        text_config={
            **COMMON,
            **LINEAR,
            "model_type": "qwen3_5_moe_text",
            "rope_parameters": ROPE,
        },
    ),
    "qwen3_5": dict(
        model_type="qwen3_5",
        text_config={
            **COMMON,
            **LINEAR,
            "model_type": "qwen3_5_text",
            "rope_parameters": ROPE,
            "num_experts": 0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": {
        **COMMON,
        **LINEAR,
        "model_type": "qwen3_next",
        "mlp_only_layers": [1],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "mlp_only_layers": [1],
        "rope_theta": 10000.0,
    },
}


def tiny(
    family: str, quantised: bool = True, dtype: mx.Dtype = mx.float32, seed: int = 0
) -> nn.Module:
    """An mlx-lm model of ``family`` in eval mode, 4-bit group 64 where quantised."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(CONFIGS[family]))
    model.set_dtype(dtype)
    if quantised:
        rule = model.quant_predicate
        nn.quantize(
            model,
            group_size=64,
            bits=4,
            class_predicate=lambda p, m: hasattr(m, "to_quantized")
            and (rule(p, m) if rule else True),
        )
    model.eval()
    mx.eval(model.parameters())
    return model
