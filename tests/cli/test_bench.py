"""``bench``: what is measured, how it is cut, what is written."""

import json
import resource
from importlib import resources

import jsonschema
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from qwen_metal import Policy
from qwen_metal.evidence import bench

SMALL = ("--prompt-tokens", 9, "--decode-tokens", 2)


@pytest.fixture(scope="module")
def schema():
    return json.loads(resources.files("qwen_metal.evidence").joinpath("bench.schema.json").read_text())


def test_result(run, quick, schema, tmp_path):
    """The object of --json, the table and the chart, with every round asked for."""
    file, chart = tmp_path / "b.json", tmp_path / "b.png"
    ended = run("bench", "--model", quick, *SMALL, "--rounds", 2, "--json", file, "--plot", chart)
    assert ended.status == 0, ended.err
    value = json.loads(file.read_text())
    jsonschema.validate(value, schema)
    wanted = ["stock", "stock_float32", "qwen_metal", "ratio", "ratio_float32", "routes", "machine"]
    assert list(value) == wanted
    for name in bench.ENGINES:
        assert value[name]["rounds"] == 2 and value[name]["prompt_tokens"] == 9
    for key, other in (("ratio", "stock"), ("ratio_float32", "stock_float32")):
        for part in ("prefill_tps", "decode_tps"):
            ratio = value["qwen_metal"][part] / value[other][part]
            assert value[key][part[:-4]] == pytest.approx(ratio)
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "ours / stock_float32" in ended.out and "routes: " in ended.out
    assert "round 2 of 2: qwen_metal" in ended.err and "s left" in ended.err


def test_counts_are_of_the_measured_rounds(run, quick, tmp_path):
    """Stock engines count nothing, and neither does a warm-up: one prompt, two steps and one ahead."""
    file = tmp_path / "b.json"
    run("bench", "--model", quick, *SMALL, "--rounds", 1, "--json", file)
    embeds = json.loads(file.read_text())["routes"]["embed"]
    # Eight tokens and the ninth, then the steps, the last one begun and not waited for.
    assert sum(n for route, n in embeds.items() if route != "reasons") == 2 + 2 + 1


def test_engines(demo_path):
    """Three dtypes over one set of packed weights, which are the same arrays in memory."""
    mx.clear_cache()
    before = mx.get_active_memory()
    engines, _ = bench.load_engines(demo_path, Policy(), strict=False)
    grown = mx.get_active_memory() - before
    size = (demo_path / "model.safetensors").stat().st_size
    assert {n: bench.dtype_of(m) for n, m in engines.items()} == {
        "stock": "bfloat16",
        "stock_float32": "float32",
        "qwen_metal": "bfloat16",
    }
    assert grown < 1.5 * size
    stock, ours = (dict(tree_flatten(engines[n].parameters())) for n in ("stock", "qwen_metal"))
    assert stock.keys() == ours.keys() and all(mx.array_equal(stock[k], ours[k]) for k in stock)


def test_prompt_has_the_length_asked_for():
    class Tokenizer:
        def encode(self, text, add_special_tokens):
            return [1, 2, 3]

    assert [bench.prompt_of(Tokenizer(), n).size for n in (1, 3, 4, 128)] == [1, 3, 4, 128]


class Clock:
    """Stands in for the time and for the engines: each takes as long as it is told."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds, self.sizes = 0.0, seconds, []
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(bench, "measure", self.measure)

    def measure(self, model, prompt, decode_tokens):
        if prompt.size > bench.WARM_UP_TOKENS:
            self.now += self.seconds[model]
            self.sizes.append((prompt.size, decode_tokens))
        return bench.Sample(self.seconds[model] / 2, self.seconds[model] / 2, 1)


def rounds_of(monkeypatch, seconds, budget):
    """Rounds that each engine gets, and the clock."""
    clock = Clock(monkeypatch, seconds)
    plan = bench.Plan(budget=budget)
    samples, _ = bench.run({n: n for n in seconds}, mx.zeros((128,)), plan)
    return {n: len(runs) for n, runs in samples.items()}, clock


def test_slow_engine_gets_fewer_rounds_and_the_same_sizes(monkeypatch):
    rounds, clock = rounds_of(monkeypatch, {"stock": 25, "stock_float32": 3, "qwen_metal": 1}, 42)
    assert rounds == {"stock": 1, "stock_float32": 3, "qwen_metal": 3}
    assert clock.now <= 42 and set(clock.sizes) == {(128, 32)}


def test_every_engine_gets_one_round(monkeypatch):
    rounds, _ = rounds_of(monkeypatch, {"stock": 100, "stock_float32": 100, "qwen_metal": 100}, 42)
    assert set(rounds.values()) == {1}


def test_no_round_is_cut_without_a_budget(monkeypatch):
    rounds, _ = rounds_of(monkeypatch, {"stock": 100, "stock_float32": 3, "qwen_metal": 1}, None)
    assert set(rounds.values()) == {3}


def test_engines_take_turns(monkeypatch):
    clock, order = Clock(monkeypatch, {"a": 1, "b": 1, "c": 1}), []
    bench.run({n: n for n in "abc"}, mx.zeros((128,)), bench.Plan(), lambda what, *_: order.append(what[-1]))
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"


def test_medians_and_spread():
    runs = [bench.Sample(128 / rate, 32 / rate, rate) for rate in (10, 40, 20)]
    figures = bench._figures(runs, bench.Plan())
    assert figures["prefill_tps"] == pytest.approx(20) and figures["prefill_spread"] == pytest.approx(1.5)
    assert figures["peak_memory_bytes"] == 40
    assert bench._figures(runs[:1], bench.Plan())["decode_spread"] is None


@pytest.mark.slow
def test_default_run_is_short(process, schema, tmp_path):
    """Under 50 seconds of two cores with the demo model (of processor time: others may be at work)."""
    file = tmp_path / "b.json"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = process("bench", "--json", file)
    out, err = child.communicate(timeout=280)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert child.returncode == 0, err
    value = json.loads(file.read_text())
    jsonschema.validate(value, schema)
    assert value["stock"]["prompt_tokens"] == 128 and value["qwen_metal"]["decode_tokens"] == 32
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 100, "two cores for 50 seconds"
    cut = [name for name in bench.ENGINES if value[name]["rounds"] < 3]
    assert all(f"{name}: {value[name]['rounds']} of 3 rounds" in err for name in cut)
