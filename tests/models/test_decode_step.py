"""The captured step: the tokens of the ordinary way, and every change of the model is seen."""

import copy
import gc
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3_5_moe
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from qwen_metal import extension
from qwen_metal.loader import accelerate, restore
from qwen_metal.models import decode_step

pytestmark = pytest.mark.skipif(
    extension.load() is None or mx.default_device() != mx.cpu, reason="needs the CPU extension"
)

TEXT = dict(
    model_type="qwen3_5_moe_text",
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=4,
    full_attention_interval=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=64,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    max_position_embeddings=1024,
)


@pytest.fixture
def model():
    mx.random.seed(3)
    args = qwen3_5_moe.ModelArgs.from_dict({"model_type": "qwen3_5_moe", "text_config": dict(TEXT)})
    model = qwen3_5_moe.Model(args)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    mx.eval(model.parameters())
    model.eval()
    return accelerate(model)


def run(model, tokens=6, B=1):
    cache = make_prompt_cache(model)
    prompt = mx.arange(7 * B).reshape(B, 7)
    outputs = [model(prompt, cache=cache)[:, -1:]]
    for i in range(tokens):
        outputs.append(model(mx.full((B, 1), 11 + i), cache=cache))
    return np.array(mx.concatenate(outputs, axis=1).astype(mx.float32)), cache


def ordinary(model, monkeypatch, **how):
    with monkeypatch.context() as patch:
        patch.setattr(decode_step, "logits", lambda *_: None)
        return run(model, **how)


def captured(model):
    return vars(model.language_model).get(decode_step.ATTRIBUTE)


@pytest.mark.parametrize("B", [1, 3])
def test_same_bits_as_the_blocks(model, monkeypatch, B):
    got, cache = run(model, B=B)
    assert captured(model).layers is not None
    wanted, other = ordinary(model, monkeypatch, B=B)
    assert np.array_equal(got, wanted)
    for a, b in zip(cache, other):
        for x, y in zip(_leaves(a), _leaves(b)):
            assert x == y if not isinstance(x, mx.array) else mx.array_equal(x, y)


def _leaves(cache):
    from mlx.utils import tree_flatten

    return [leaf for _, leaf in tree_flatten(list(cache.state))]


def test_new_weights_are_seen(model, monkeypatch):
    run(model)
    before = captured(model)
    weight = model.layers[1].linear_attn.norm.weight
    model.layers[1].linear_attn.norm.weight = weight * 3
    got, _ = run(model)
    assert captured(model) is not before
    assert np.array_equal(got, ordinary(model, monkeypatch)[0])


SETTINGS = {
    "top_k": lambda m: setattr(m.layers[0].mlp, "top_k", 1),
    "norm_topk_prob": lambda m: setattr(m.layers[0].mlp, "norm_topk_prob", False),
    "norm eps": lambda m: setattr(m.layers[0].input_layernorm, "eps", 0.5),
    "rope scale": lambda m: setattr(m.layers[3].self_attn.rope, "scale", 0.5),
    "attention scale": lambda m: setattr(m.layers[3].self_attn, "scale", 0.5),
    "a bias more": lambda m: setattr(m.layers[3].self_attn.o_proj, "bias", mx.ones((128,))),
    "a bias of the head": lambda m: setattr(m.language_model.lm_head, "bias", mx.arange(256.0)),
    "a norm's class": lambda m: setattr(m.layers[0].input_layernorm, "__class__", DoublingNorm),
    "tied": lambda m: setattr(m.language_model.args, "tie_word_embeddings", True),
}


class DoublingNorm(nn.RMSNorm):
    def __call__(self, x):
        return super().__call__(x) * 2


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_settings_are_seen(model, monkeypatch, change):
    before, _ = run(model)
    change(model)
    got, _ = run(model)
    assert not np.array_equal(got, before)
    assert np.array_equal(got, ordinary(model, monkeypatch)[0])


def test_a_model_is_freed_without_the_collector(model):
    run(model)
    assert captured(model).layers is not None
    # The fixture holds this model; its copy has no other owner.
    copied = copy.deepcopy(model)
    run(copied)
    held = weakref.ref(copied.layers[0])
    gc.disable()
    try:
        del copied
        assert held() is None
    finally:
        gc.enable()


def test_a_prompt_drops_a_step_of_replaced_weights(model):
    run(model)
    model.set_dtype(mx.float16)
    model(mx.arange(5)[None], cache=make_prompt_cache(model))
    assert captured(model) is None


def test_load_weights_is_seen(model, monkeypatch):
    from mlx.utils import tree_flatten

    run(model)
    doubled = [(k, v * 2) for k, v in tree_flatten(model.parameters()) if k.endswith("scales")]
    model.load_weights(doubled, strict=False)
    assert np.array_equal(run(model)[0], ordinary(model, monkeypatch)[0])


def test_adapters_and_training_take_the_other_way(model, monkeypatch):
    run(model)
    assert captured(model).layers is not None
    model.train()
    run(model, tokens=1)
    assert captured(model).layers is None
    model.eval()
    run(model, tokens=1)
    assert captured(model).layers is not None
    linear_to_lora_layers(model, 4, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    got, _ = run(model)
    assert captured(model).layers is None
    assert np.array_equal(got, ordinary(model, monkeypatch)[0])


def test_restore_leaves_nothing(model):
    run(model)
    restore(model)
    assert captured(model) is None
    run(model)
    assert captured(model) is None


def test_a_copy_captures_its_own(model):
    got, _ = run(model)
    copied = copy.deepcopy(model)
    assert captured(copied) is None
    assert np.array_equal(run(copied)[0], got)


def test_gradients_pass_by(model):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.arange(5)[None], cache=cache), [c.state for c in cache])

    def loss(weight):
        model.language_model.model.norm.weight = weight
        return model(mx.array([[3]]), cache=make_prompt_cache(model)).sum()

    kept = model.language_model.model.norm.weight
    gradient = mx.grad(loss)(kept)
    model.language_model.model.norm.weight = kept
    assert gradient.shape == kept.shape and np.isfinite(np.array(gradient.astype(mx.float32))).all()


@pytest.mark.parametrize("layer", [0, 3])
def test_gradients_of_a_cache_pass_by(model, monkeypatch, layer):
    cache = make_prompt_cache(model)
    mx.eval(model(mx.arange(5)[None], cache=cache), [c.state for c in cache])
    run(model)
    assert captured(model).layers is not None

    def loss(value):
        copied = copy.deepcopy(cache)
        if layer == 0:
            copied[0].cache[1] = value
        else:
            copied[3].keys = value
        return model(mx.array([[3]]), cache=copied).sum()

    value = cache[0].cache[1] if layer == 0 else cache[3].keys
    got = np.array(mx.grad(loss)(value).astype(mx.float32))
    with monkeypatch.context() as patch:
        patch.setattr(decode_step, "logits", lambda *_: None)
        assert np.array_equal(got, np.array(mx.grad(loss)(value).astype(mx.float32)))
