"""An accelerated model computes what mlx-lm computes: logits and every field of every cache.

Token counts are odd on purpose, and stand on both sides of each boundary: 8 rows
(decode or prefill experts), 64 pairs (mlx-lm sorts by expert), 256 tokens (a KV buffer grows).
"""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3_next
from models.agree import Route, prompt, rrmse, run, steps
from models.tiny import CONFIGS, tiny

import qwen_metal
from qwen_metal.policy import Policy

COUNTS = (1, 7, 8, 9, 17, 31, 33, 63, 65)
EXACT, AUTO = Route("kernels=stock", exact=True), Route("", exact=False)
SPARSE = [f for f in CONFIGS if f != "qwen3_5"]


@pytest.mark.parametrize("quantised", [True, False], ids=["4bit", "float"])
def test_float32(family, quantised, pair, route):
    stock, ours = pair(family, quantised=quantised)
    for count in COUNTS:
        want, want_cache = run(stock, steps(count, 2))
        got, cache = run(ours, steps(count, 2))
        route.agree(got, want, f"{count} tokens")
        route.agree_caches(cache, want_cache)


# mlx has no gather_mm in bfloat16 on the CPU, so of the unquantised models only the dense one runs.
@pytest.mark.parametrize("family, quantised", [*((f, True) for f in CONFIGS), ("qwen3_5", False)])
def test_bfloat16_of_the_stock_path(family, quantised):
    # The stock path rounds wherever mlx-lm rounds: bit-equal in bfloat16 too.
    stock, ours = (tiny(family, quantised, mx.bfloat16) for _ in range(2))
    qwen_metal.accelerate(ours, "kernels=stock")
    for count in (1, 7, 17, 33):
        want, want_cache = run(stock, steps(count, 2))
        got, cache = run(ours, steps(count, 2))
        EXACT.agree(got, want, f"{count} tokens")
        EXACT.agree_caches(cache, want_cache)


def test_bfloat16_of_the_fastest_route(family):
    # Judged by the error against float32 arithmetic on the same weights, which must be no
    # larger than mlx-lm's own; and dtypes stay mlx-lm's (the recurrent state float32).
    stock, ours = (tiny(family, dtype=mx.bfloat16) for _ in range(2))
    qwen_metal.accelerate(ours)
    truth = tiny(family, dtype=mx.bfloat16)
    truth.set_dtype(mx.float32)
    want, want_cache = run(stock, steps(33, 4))
    got, cache = run(ours, steps(33, 4))
    exact, _ = run(truth, steps(33, 4))
    assert got.dtype == want.dtype == mx.bfloat16
    assert rrmse(got, exact) <= 1.1 * rrmse(want, exact)
    for a, b in zip(cache, want_cache):
        assert dtypes(a) == dtypes(b)


def dtypes(cache) -> list:
    """Dtypes of a cache's arrays in the order of its state."""
    return [t.dtype for t in (cache.cache if hasattr(cache, "cache") else (cache.keys, cache.values))]


def test_state_is_float32_in_a_bfloat16_model(route):
    # mlx-lm 997, 1061: a recurrent state in bfloat16 drifts, then collapses.
    model = qwen_metal.accelerate(tiny("qwen3_5_moe", dtype=mx.bfloat16), route.policy)
    _, cache = run(model, steps(9, 1))
    window, state = cache[0].cache
    assert (window.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    assert window.shape == (1, 3, 2 * 2 * 32 + 4 * 32) and state.shape == (1, 4, 32, 32)


def test_without_a_cache(family, pair, route):
    stock, ours = pair(family)
    for count in (1, 33):
        route.agree(ours(prompt(count)), stock(prompt(count)), f"{count} tokens")


def test_float16(route):
    stock, ours = (tiny("qwen3_5_moe", dtype=mx.float16) for _ in range(2))
    qwen_metal.accelerate(ours, route.policy)
    got, _ = run(ours, steps(9, 1))
    want, _ = run(stock, steps(9, 1))
    assert got.dtype == mx.float16
    if route.exact:
        route.agree(got, want)
    truth = tiny("qwen3_5_moe", dtype=mx.float16)
    truth.set_dtype(mx.float32)
    exact, _ = run(truth, steps(9, 1))
    assert rrmse(got, exact) <= 1.1 * rrmse(want, exact)


def test_numerics_match_rounds_as_stock_does(family):
    stock, ours = (tiny(family, dtype=mx.bfloat16) for _ in range(2))
    qwen_metal.accelerate(ours, "numerics=match")
    EXACT.agree(run(ours, steps(9, 1))[0], run(stock, steps(9, 1))[0])


@pytest.mark.parametrize("family", SPARSE)
def test_bits_are_read_module_by_module(family, pair, route):
    # flash-moe 10, 14: the 8-bit router of a 4-bit checkpoint read as 4-bit. Here every
    # module has bits and group of its own.
    def mixed(path, module):
        choice = {"q_proj": (8, 32), "o_proj": (5, 64), "down_proj": (6, 32), "gate": (3, 32), "lm_head": (2, 64)}
        bits, group = choice.get(path.rsplit(".", 1)[-1], (4, 64))
        return hasattr(module, "to_quantized") and {"bits": bits, "group_size": group}

    stock, ours = pair(family, quantised=False)
    for model in (stock, ours):
        nn.quantize(model, class_predicate=mixed)
    for count in (1, 9, 33):
        got, _ = run(ours, steps(count, 1))
        route.agree(got, run(stock, steps(count, 1))[0], f"{count} tokens")


@pytest.mark.parametrize("mode, group", [("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)])
def test_floating_point_formats(mode, group, pair, route):
    stock, ours = pair("qwen3_5_moe", quantised=False)
    for model in (stock, ours):
        nn.quantize(model, group_size=group, bits=8 if mode == "mxfp8" else 4, mode=mode)
    if route.exact:
        route.agree(run(ours, steps(17, 1))[0], run(stock, steps(17, 1))[0])
    # mlx's embedding of these formats answers in bfloat16, so float32 begins after it.
    for count in (1, 17):
        x = mx.random.normal((1, count, 64), key=mx.random.key(count))
        got, want = (m(prompt(count), input_embeddings=x) for m in (ours, stock))
        route.agree(got, want, f"{count} tokens")


def built(module, config):
    """A model of this configuration in eval mode, the same at every call."""
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    return model


CONTROLS = [
    f"{row['name']}={value}"
    for row in Policy.table()
    if "cpu" in row["on"]
    for value in row["values"]
    if value != row["default"]
]


@pytest.mark.parametrize("control", CONTROLS)
def test_each_value_of_a_policy_computes_the_same(control):
    # An ablation compares speed: what is computed may not change with the mechanism.
    stock, ours = tiny("qwen3_5_moe"), qwen_metal.accelerate(tiny("qwen3_5_moe"), control)
    for count in (1, 33):
        got, cache = run(ours, steps(count, 1))
        want, want_cache = run(stock, steps(count, 1))
        AUTO.agree(got, want, f"{count} tokens")
        AUTO.agree_caches(cache, want_cache)


def test_attention_bias_and_tied_head(route):
    config = {**CONFIGS["qwen3_next"], "attention_bias": True, "tie_word_embeddings": True}
    stock, ours = (built(qwen3_next, config) for _ in range(2))
    for model in (stock, ours):  # a fresh bias is small: make it matter
        for layer in model.layers:
            if not layer.is_linear:
                layer.self_attn.q_proj.bias = mx.linspace(-1, 1, layer.self_attn.q_proj.bias.size)
    qwen_metal.accelerate(ours, route.policy)
    got, _ = run(ours, steps(17, 2))
    route.agree(got, run(stock, steps(17, 2))[0])


def test_other_rope_scaling(route):
    # No kernel knows yarn: the operation falls back, the rest of the block does not.
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = {**CONFIGS["qwen3_next"], "rope_scaling": scaling}
    stock, ours = (built(qwen3_next, config) for _ in range(2))
    qwen_metal.accelerate(ours, route.policy)
    got, _ = run(ours, steps(17, 2))
    route.agree(got, run(stock, steps(17, 2))[0])


@pytest.mark.parametrize("count", [1000, pytest.param(2047, marks=pytest.mark.slow)])
def test_long_odd_prompts(count, pair, route):
    stock, ours = pair("qwen3_5_moe")
    want, want_cache = run(stock, steps(count, 1))
    got, cache = run(ours, steps(count, 1))
    route.agree(got, want)
    route.agree_caches(cache, want_cache)
