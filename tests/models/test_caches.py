"""Prompt caches: the same classes, and the same result however a prompt is cut, kept or packed."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    QuantizedKVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from models.agree import Route, greedy, prompt, rrmse, run, steps
from models.tiny import tiny

import qwen_metal


@pytest.mark.parametrize("chunk", [1, 7, 64, 2048])
def test_chunks_by_the_caller(chunk, family, pair, route):
    stock, ours = pair(family)
    tokens, length = prompt(70), 70
    pieces = [tokens[:, i : i + chunk] for i in range(0, length, chunk)]
    whole, whole_cache = run(ours, [tokens])
    got, cache = run(ours, pieces)
    assert rrmse(got, whole) <= 1e-5
    for a, b in zip(cache, whole_cache):
        assert a.size() == b.size()
    # And cut the same way, mlx-lm leaves the same in every field.
    want, want_cache = run(stock, pieces)
    route.agree(got, want)
    route.agree_caches(cache, want_cache)


@pytest.mark.parametrize("length", [63, 64, 65, 129])
def test_chunks_by_policy(length, family, route):
    # prefill_chunk cuts a long forward, state carried across; caches end as if it were whole.
    ours = qwen_metal.accelerate(tiny(family), f"{route.policy},prefill_chunk=64")
    whole = qwen_metal.accelerate(tiny(family), f"{route.policy},prefill_chunk=0")
    got, cache = run(ours, steps(length, 1))
    want, want_cache = run(whole, steps(length, 1))
    assert rrmse(got, want) <= 1e-5
    Route("", exact=False).agree_caches(cache, want_cache)


def test_policy_chunks_are_counted_once_a_piece(route):
    model = qwen_metal.accelerate(tiny("qwen3_moe"), f"{route.policy},prefill_chunk=64")
    qwen_metal.routes(reset=True)
    run(model, [prompt(129)])
    # 64, 64 and 1 tokens through 4 attention layers.
    calls = qwen_metal.routes(reset=True)
    assert total(calls["attention_prefill"]) == 8 and total(calls["gqa_decode"]) == 4


def total(calls: dict) -> int:
    """Calls of an operation, whatever the route."""
    return sum(n for route, n in calls.items() if route != "reasons")


def test_a_rotating_cache_is_not_cut_by_policy(pair, route):
    # Its window makes a cut visible, so a forward through it stays whole.
    stock = tiny("qwen3_moe")
    ours = qwen_metal.accelerate(tiny("qwen3_moe"), f"{route.policy},prefill_chunk=64")
    got, cache = run(ours, [prompt(100)], make_prompt_cache(ours, max_kv_size=32))
    want, want_cache = run(stock, [prompt(100)], make_prompt_cache(stock, max_kv_size=32))
    route.agree(got, want)
    route.agree_caches(cache, want_cache)


@pytest.mark.parametrize("direction", ["ours to ours", "ours to stock", "stock to ours"])
def test_saved_and_reloaded(direction, family, pair, route, tmp_path):
    stock, ours = pair(family)
    writer, reader = ((ours, stock)[name == "stock"] for name in direction.split(" to "))
    file = str(tmp_path / "cache.safetensors")
    _, cache = run(writer, [prompt(33)])
    save_prompt_cache(file, cache, {"tokens": "33"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"tokens": "33"} and [type(c) for c in loaded] == [type(c) for c in cache]
    got, after = run(reader, [prompt(5), prompt(1)], loaded)
    want, want_after = run(stock, [prompt(5), prompt(1)], run(stock, [prompt(33)])[1])
    route.agree(got, want)
    route.agree_caches(after, want_after)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_kv_from_token_0(bits, family, pair, route):
    stock, ours = pair(family)

    def quantised(model):
        plain = make_prompt_cache(model)
        return [QuantizedKVCache(64, bits) if hasattr(c, "to_quantized") else c for c in plain]

    pieces = [prompt(17), prompt(9, seed=3), prompt(1), prompt(1)]
    got, cache = run(ours, pieces, quantised(ours))
    want, want_cache = run(stock, pieces, quantised(stock))
    if route.exact:
        route.agree(got, want)
        route.agree_caches(cache, want_cache)
    else:  # a key that rounds to the next of 16 codes moves a logit more than 1e-5
        assert rrmse(got, want) <= 1e-2


@pytest.mark.parametrize("start", [0, 12, 20])
def test_quantised_kv_switched_in_mid_way(start, family, pair, route):
    # At token 0, inside the prompt's pieces, and while decoding: mlx-lm puts another cache
    # class in the list, and the very next forward must read it.
    stock, ours = pair(family)
    settings = dict(kv_bits=8, kv_group_size=64, quantized_kv_start=start, prefill_step_size=7)
    caches = [make_prompt_cache(m) for m in (stock, ours)]
    want = greedy(stock, prompt(17), 12, prompt_cache=caches[0], **settings)
    got = greedy(ours, prompt(17), 12, prompt_cache=caches[1], **settings)
    assert got == want
    assert any(isinstance(c, QuantizedKVCache) for c in caches[1])
    if route.exact:
        route.agree_caches(caches[1], caches[0])


@pytest.mark.parametrize("window, chunk", [(16, 64), (16, 7), (64, 2048), (5, 1)])
def test_rotating(window, chunk, pair, route):
    # Only Qwen3-MoE has them: the hybrid families make their own caches.
    stock, ours = pair("qwen3_moe")
    tokens = prompt(40)
    pieces = [tokens[:, i : i + chunk] for i in range(0, 40, chunk)] + steps(1, 30)[1:]
    caches = [make_prompt_cache(m, max_kv_size=window) for m in (stock, ours)]
    assert isinstance(caches[1][0], RotatingKVCache)
    want, want_cache = run(stock, pieces, caches[0])
    got, cache = run(ours, pieces, caches[1])
    route.agree(got, want)
    route.agree_caches(cache, want_cache)


def test_trimming_and_its_refusal(family, pair, route):
    stock, ours = pair(family)
    _, cache = run(ours, [prompt(20)])
    _, want_cache = run(stock, [prompt(20)])
    assert can_trim_prompt_cache(cache) == can_trim_prompt_cache(want_cache) == (family == "qwen3_moe")
    assert trim_prompt_cache(cache, 6) == trim_prompt_cache(want_cache, 6)
    got, cache = run(ours, [prompt(3), prompt(1)], cache)
    want, want_cache = run(stock, [prompt(3), prompt(1)], want_cache)
    route.agree(got, want)
    route.agree_caches(cache, want_cache)


def test_a_kv_buffer_grows(pair, route):
    # The buffer holds 256 tokens and is replaced at the 257th.
    stock, ours = pair("qwen3_moe")
    got, cache = run(ours, steps(254, 4))
    want, want_cache = run(stock, steps(254, 4))
    assert cache[0].keys.shape[2] == 512
    route.agree(got, want)
    route.agree_caches(cache, want_cache)


def test_kept_slices_do_not_pin_their_parent(route):
    # mlx-lm 1077: the 3 kept rows of a window of 2,051 held all of it, 540 KB a token.
    model = qwen_metal.accelerate(tiny("qwen3_5"), route.policy)
    cache = make_prompt_cache(model)
    mx.eval(model(prompt(600), cache=cache))
    mx.eval([c.state for c in cache])
    mx.clear_cache()
    full = mx.get_active_memory()
    held = sum(c.nbytes for c in cache)
    del cache
    freed = full - mx.get_active_memory()
    assert held <= freed <= held + 64 * 1024, f"the caches name {held} bytes and held {freed}"
