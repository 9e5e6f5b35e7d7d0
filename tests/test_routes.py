"""``routes()``: each call is counted once, under the route that served it, on every thread."""

import importlib
import threading

import mlx.core as mx
import pytest
from models.tiny import tiny

import qwen_metal

# `qwen_metal.routes` is the function of this name; the module is meant.
routes = importlib.import_module("qwen_metal.routes")


@pytest.fixture(autouse=True)
def fresh():
    routes.routes(reset=True)
    yield
    routes.routes(reset=True)


def test_counts_by_route_and_reason():
    routes.fast("a", "cpu")
    routes.fast("a", "cpu")
    routes.stock("a", "too wide")
    routes.stock("b", "too wide")
    routes.stock("b", "no kernel")
    assert qwen_metal.routes() == {
        "a": {"cpu": 2, "stock": 1, "reasons": {"too wide": 1}},
        "b": {"stock": 2, "reasons": {"too wide": 1, "no kernel": 1}},
    }


def test_reset_answers_and_starts_anew():
    routes.fast("a", "cpu")
    assert qwen_metal.routes(reset=True) == {"a": {"cpu": 1}}
    assert qwen_metal.routes() == {}


def test_the_answer_is_a_copy():
    routes.stock("a", "r")
    qwen_metal.routes()["a"]["reasons"]["r"] = 99
    assert qwen_metal.routes()["a"]["reasons"]["r"] == 1


def test_strict_raises_and_counts_nothing():
    with routes.strict(True), pytest.raises(routes.Unsupported, match="^a: too wide$"):
        routes.stock("a", "too wide")
    assert qwen_metal.routes() == {}
    assert issubclass(routes.Unsupported, ValueError)


def test_strict_nests_and_ends_with_an_error():
    with routes.strict(True):
        with routes.strict(False):
            routes.stock("a", "r")
        with pytest.raises(routes.Unsupported):
            routes.stock("a", "r")
    with pytest.raises(KeyError), routes.strict(True):
        raise KeyError
    routes.stock("a", "r")
    assert qwen_metal.routes()["a"]["stock"] == 2


def test_strict_and_separate_are_of_one_thread():
    def other():
        routes.stock("a", "r")

    with routes.strict(True), routes.separate() as apart:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert apart() == {}
    assert qwen_metal.routes() == {"a": {"stock": 1, "reasons": {"r": 1}}}


def test_separate_counts_apart_and_nests():
    routes.fast("a", "cpu")
    with routes.separate() as outer:
        routes.fast("b", "cpu")
        with routes.separate() as inner:
            routes.fast("c", "cpu")
            assert inner() == {"c": {"cpu": 1}}
        assert outer() == {"b": {"cpu": 1}}
    assert qwen_metal.routes() == {"a": {"cpu": 1}}


def test_no_count_is_lost_between_threads():
    threads = [
        threading.Thread(target=lambda: [routes.fast("a", "cpu") for _ in range(2000)]) for _ in range(4)
    ]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert qwen_metal.routes() == {"a": {"cpu": 8000}}


def test_fast_share():
    assert routes.fast_share({}) == 0.0
    counts = {"a": {"cpu": 3, "stock": 1, "reasons": {"r": 1}}, "b": {"metal": 4}}
    assert routes.fast_share(counts) == 7 / 8


@pytest.mark.parametrize("family, tokens, wanted", [
    # 4 layers, three of them Gated DeltaNet; every one with experts.
    ("qwen3_5_moe", 1, {"embed": 1, "gated_delta_step": 3, "gqa_decode": 1, "moe_decode": 4, "projections": 13}),
    ("qwen3_5_moe", 9, {"embed": 1, "gated_delta_prepare": 3, "gated_delta_scan": 3, "gated_norm": 3,
                        "attention_prefill": 1, "route_plan": 4, "grouped_qmm": 8, "gather_sum": 4}),
    # 4 attention layers, the second with a dense MLP.
    ("qwen3_moe", 1, {"kv_append": 4, "attention_prepare": 4, "gqa_decode": 4, "moe_decode": 3, "route_topk": 3}),
])
def test_a_forward_is_counted_operation_by_operation(family, tokens, wanted):
    from mlx_lm.models.cache import make_prompt_cache

    model = qwen_metal.accelerate(tiny(family))
    mx.eval(model(mx.zeros((1, tokens), mx.int32), cache=make_prompt_cache(model)))
    counts = qwen_metal.routes()
    calls = {op: sum(n for r, n in v.items() if r != "reasons") for op, v in counts.items()}
    assert {op: calls[op] for op in wanted} == wanted
    # llama.cpp 27473: a fast path silently off for weeks. What stock served has its reason.
    for op, v in counts.items():
        assert sum(v.get("reasons", {}).values()) == v.get("stock", 0), op


def test_the_stock_policy_is_the_reason():
    model = qwen_metal.accelerate(tiny("qwen3_5_moe"), "kernels=stock")
    mx.eval(model(mx.zeros((1, 3), mx.int32)))
    counts = qwen_metal.routes()
    assert routes.fast_share(counts) == 0
    assert {r for v in counts.values() for r in v["reasons"]} == {"policy: kernels='stock'"}
