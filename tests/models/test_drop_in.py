"""The drop-in contract: the model stays the object that mlx-lm made, in every respect."""

import copy
import pickle

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, save_model
from models.agree import Route, prompt, rrmse, run, steps
from models.tiny import CONFIGS, tiny

import qwen_metal
from qwen_metal import ops
from qwen_metal.kernels import cpu


def modules(model) -> dict:
    """Module objects by name, and their classes."""
    return {name: (id(m), type(m), dict(vars(m))) for name, m in model.named_modules()}


def parameters(model) -> dict:
    return {name: id(value) for name, value in tree_flatten(model.parameters())}


def test_restore_gives_back_the_very_same_model(family, route):
    model = tiny(family)
    before, weights = modules(model), parameters(model)
    assert qwen_metal.accelerate(model, route.policy) is model
    assert qwen_metal.is_accelerated(model)
    assert all(t.__module__.startswith("mlx") for _, t, _ in before.values())
    assert {k: v[0] for k, v in modules(model).items()} == {k: v[0] for k, v in before.items()}
    assert parameters(model) == weights, "parameters keep their names and are the same arrays"
    run(model, steps(9, 2))
    assert qwen_metal.restore(model) is model
    assert modules(model) == before and parameters(model) == weights
    assert not qwen_metal.is_accelerated(model)
    qwen_metal.routes(reset=True)
    want, want_cache = run(tiny(family), steps(9, 2))
    got, cache = run(model, steps(9, 2))
    Route("", exact=True).agree(got, want)
    assert qwen_metal.routes() == {}


def test_every_block_of_every_layer_is_replaced(family):
    # A module that was missed would be right and slow for ever: nothing else would show it.
    model = qwen_metal.accelerate(tiny(family))
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in ("linear_attn", "self_attn", "mlp") or name.endswith(".layers"):
            assert type(module).__module__.startswith("qwen_metal"), name


def test_accelerate_twice_changes_the_settings(family):
    model = tiny(family)
    qwen_metal.accelerate(model, "prefill_chunk=64")
    classes = {n: t for n, (_, t, _) in modules(model).items()}
    qwen_metal.accelerate(model, "prefill_chunk=0", strict=False)
    assert {n: t for n, (_, t, _) in modules(model).items()} == classes
    qwen_metal.routes(reset=True)
    run(model, [prompt(65)])
    calls = qwen_metal.routes(reset=True)["embed"]
    assert sum(n for k, n in calls.items() if k != "reasons") == 1
    attention = qwen_metal.routes(reset=True)
    assert attention == {}
    qwen_metal.restore(model)
    assert not qwen_metal.is_accelerated(model)
    assert qwen_metal.restore(model) is model  # once more is no error


def test_save_model_round_trip(family, pair, route, tmp_path):
    import json

    stock, ours = pair(family)
    config = {**CONFIGS[family], "quantization": {"group_size": 64, "bits": 4}}
    for name, module in stock.named_modules():
        if getattr(module, "bits", 4) != 4:
            config["quantization"][name] = {"group_size": module.group_size, "bits": module.bits}
    for model, folder in ((stock, tmp_path / "stock"), (ours, tmp_path / "ours")):
        save_model(folder, model)
        (folder / "config.json").write_text(json.dumps(config))
    one, other = (mx.load(str(tmp_path / n / "model.safetensors")) for n in ("stock", "ours"))
    assert list(one) == list(other)
    assert all(mx.array_equal(one[n], other[n]) for n in one)
    again, _ = load_model(tmp_path / "ours")
    qwen_metal.accelerate(again, route.policy)
    route.agree(run(again, steps(9, 1))[0], run(stock, steps(9, 1))[0])


def test_new_weights_are_seen(pair, route):
    # Weights are read from the modules at each call; nothing packed or compiled is left over.
    _, ours = pair("qwen3_5_moe")
    other = tiny("qwen3_5_moe", seed=7)
    run(ours, steps(9, 1))
    ours.load_weights(list(tree_flatten(other.parameters())))
    route.agree(run(ours, steps(9, 1))[0], run(other, steps(9, 1))[0])


def test_quantised_after_accelerate(pair, route):
    stock, ours = pair("qwen3_moe", quantised=False)
    for model in (stock, ours):
        nn.quantize(model, group_size=32, bits=8)
    route.agree(run(ours, steps(9, 1))[0], run(stock, steps(9, 1))[0])


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "qwen3_moe"])
def test_sharded_over_one_process(family, pair, route):
    stock, ours = pair(family)
    group = mx.distributed.init()
    assert group.size() == 1
    for model in (stock, ours):
        model.shard(group)
    qwen_metal.routes(reset=True)
    want, want_cache = run(stock, steps(17, 2))
    got, cache = run(ours, steps(17, 2))
    counts = qwen_metal.routes(reset=True)
    route.agree(got, want)
    route.agree_caches(cache, want_cache)
    assert "attention" in counts  # counted, with its reason
    assert any("Sharded" in r or "shard" in r for r in counts["attention"]["reasons"])


class OneOfTwo:
    """A group of two ranks of which this process is one."""

    def __init__(self, rank):
        self._rank = rank

    def rank(self):
        return self._rank

    def size(self):
        return 2


@pytest.mark.parametrize("rank", [0, 1])
def test_pipelined(rank, family, pair, route, monkeypatch):
    # Each rank's own half of the layers, with what it sends and receives cut short.
    monkeypatch.setattr(mx.distributed, "recv_like", lambda x, source, **_: x * 0.5)
    monkeypatch.setattr(mx.distributed, "send", lambda x, to, **_: x)
    monkeypatch.setattr(mx.distributed, "all_gather", lambda x, **_: mx.concatenate([x, x]))
    stock, ours = pair(family)
    for model in (stock, ours):
        inner = getattr(model, "language_model", model).model
        inner.pipeline(OneOfTwo(rank))
    assert len(ours.layers) == 2
    want, want_cache = run(stock, steps(17, 2))
    got, cache = run(ours, steps(17, 2))
    route.agree(got, want)
    route.agree_caches(cache, want_cache)


def test_train_and_eval_reach_every_module(family):
    model = qwen_metal.accelerate(tiny(family))
    model.train()
    assert all(m.training for _, m in model.named_modules())
    model.eval()
    assert not any(m.training for _, m in model.named_modules())


def test_deepcopy(family, pair, route):
    stock, ours = pair(family)
    assert copy.deepcopy(stock) is not stock  # stock can
    other = copy.deepcopy(ours)
    assert qwen_metal.is_accelerated(other) and other is not ours
    qwen_metal.restore(other)
    assert qwen_metal.is_accelerated(ours), "the copy is independent"
    route.agree(run(ours, steps(9, 1))[0], run(stock, steps(9, 1))[0])
    assert mx.array_equal(run(other, steps(9, 1))[0], run(stock, steps(9, 1))[0])


def test_pickle_as_stock(family):
    # Parametrised by what stock itself can do, so that we never do less.
    stock, ours = tiny(family), qwen_metal.accelerate(tiny(family))
    try:
        pickle.loads(pickle.dumps(stock))
    except Exception as error:
        with pytest.raises(type(error)):
            pickle.loads(pickle.dumps(ours))
        return
    again = pickle.loads(pickle.dumps(ours))
    assert mx.array_equal(again(prompt(9)), ours(prompt(9)))


# --- a user's own classes -------------------------------------------------------------------


class LoudMoe(qwen3_moe.Qwen3MoeSparseMoeBlock):
    def __call__(self, x):
        return 2 * super().__call__(x)


class LoudAttention(qwen3_next.Qwen3NextAttention):
    def __call__(self, x, mask=None, cache=None):
        return 2 * super().__call__(x, mask, cache)


class LoudDelta(qwen3_5.GatedDeltaNet):
    def __call__(self, x, mask=None, cache=None):
        return 2 * super().__call__(x, mask, cache)


class LoudLayer(qwen3_5.DecoderLayer):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, cache) + x[..., ::-1]


class LoudMoeLayer(qwen3_moe.Qwen3MoeDecoderLayer):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, cache) + x[..., ::-1]


class LoudModel(qwen3_5_moe.Model):
    def __call__(self, *args, **settings):
        return 2 * super().__call__(*args, **settings)


OWN = {
    "mlp": ("qwen3_moe", lambda m: m.layers[0].mlp, LoudMoe, "moe"),
    "attention": ("qwen3_5_moe", lambda m: m.layers[3].self_attn, LoudAttention, "attention"),
    "delta": ("qwen3_5", lambda m: m.layers[1].linear_attn, LoudDelta, "deltanet"),
    "layer": ("qwen3_5_moe", lambda m: m.layers[0], LoudLayer, "layer"),
    "attention layer": ("qwen3_5_moe", lambda m: m.layers[3], LoudLayer, "layer"),
    "moe layer": ("qwen3_moe", lambda m: m.layers[2], LoudMoeLayer, "layer"),
    "model": ("qwen3_5_moe", lambda m: m, LoudModel, None),
}


@pytest.mark.parametrize("part", OWN)
def test_a_users_own_subclass(part, pair, route):
    # Its forward is called, as mlx-lm would call it; it is counted; the rest is accelerated.
    family, find, kind, counted = OWN[part]
    models = tiny(family), tiny(family)
    for model in models:
        find(model).__class__ = kind
    stock, ours = models
    qwen_metal.accelerate(ours, route.policy)
    qwen_metal.routes(reset=True)
    got, cache = run(ours, steps(17, 2))
    counts = qwen_metal.routes(reset=True)
    want, want_cache = run(stock, steps(17, 2))
    route.agree(got, want)
    route.agree_caches(cache, want_cache)
    assert rrmse(run(tiny(family), steps(17, 2))[0], want) > 1e-2, "the subclass matters"
    if counted:
        assert counts[counted]["reasons"] == {f"a {kind.__name__} is called as it is": 3}
    qwen_metal.restore(ours)
    assert type(find(ours)) is kind


def test_a_layer_put_in_afterwards(pair, route):
    stock, ours = pair("qwen3_5_moe")
    for model in (stock, ours):
        fresh = tiny("qwen3_5_moe", seed=5)
        model.layers[1] = fresh.layers[1]
    route.agree(run(ours, steps(17, 2))[0], run(stock, steps(17, 2))[0])


# --- one fast operation among stock ones ----------------------------------------------------


def causal_or_not(q, keys, values, scale, start, causal, gate, quantised):
    """A prefill kernel's call in terms of the reference."""
    from mlx_lm.models.base import create_causal_mask

    length = (keys[0] if quantised else keys).shape[2]
    mask = "causal" if causal else None
    if start is not None:
        mask = create_causal_mask(q.shape[2], offset=length - q.shape[2], left_padding=start)
    return ops.attention_prefill.reference(q, keys, values, scale, mask, gate, quantised)


def one_token(q, keys, values, scale, start, gate, quantised):
    """A decode kernel's call in terms of the reference."""
    return causal_or_not(q, keys, values, scale, start, True, gate, quantised)


STAND_INS = {
    **{name: getattr(ops, name).reference for name in ops.NAMES},
    "attention_prefill": causal_or_not,
    "gqa_decode": one_token,
    "gather_sum": ops.grouped_qmm.reference_gather_sum,
}


@pytest.mark.parametrize("op", STAND_INS)
def test_one_fast_operation_among_stock_ones(op, monkeypatch):
    # A build may have a kernel of one operation and not of the next. The contracts let a kernel
    # answer in float32; whatever follows must still leave hidden states and caches in mlx-lm's dtypes.
    def missing(name, policy):
        return None if name == op else "only one kernel in this test"

    monkeypatch.setattr(cpu, "missing", missing)
    monkeypatch.setattr(cpu, op, STAND_INS[op], raising=False)
    policy = "delta_scan=chunk" if op == "gated_delta_chunk" else ""
    monkeypatch.setattr("qwen_metal.loader._check_policy", lambda policy: None)
    model = tiny("qwen3_5_moe", dtype=mx.bfloat16)
    want, want_cache = run(model, steps(17, 2))
    truth = tiny("qwen3_5_moe", dtype=mx.bfloat16)
    truth.set_dtype(mx.float32)
    exact, _ = run(truth, steps(17, 2))
    qwen_metal.accelerate(model, policy)
    qwen_metal.routes(reset=True)
    got, cache = run(model, steps(17, 2))
    assert qwen_metal.routes(reset=True)[op].get("cpu"), "the operation ran on its fast route"
    assert got.dtype == want.dtype
    for ours, theirs in zip(cache, want_cache):
        for a, b in zip(tree_flatten(ours.state), tree_flatten(theirs.state)):
            assert type(a[1]) is type(b[1]) and getattr(a[1], "dtype", 0) == getattr(b[1], "dtype", 0)
            assert getattr(a[1], "shape", 0) == getattr(b[1], "shape", 0)
    assert rrmse(got, exact) <= 1.25 * rrmse(want, exact)


def test_a_batch_on_fast_attention(monkeypatch):
    # start (left padding) reaches the kernels' calls, and padding never their answer.
    from models.test_batches import LENGTHS, batch_cache, following, padded

    monkeypatch.setattr(cpu, "missing", lambda name, policy: None)
    for op, stand_in in STAND_INS.items():
        monkeypatch.setattr(cpu, op, stand_in, raising=False)
    stock, ours = tiny("qwen3_5_moe"), qwen_metal.accelerate(tiny("qwen3_5_moe"))
    tokens, padding = padded(left=True)
    got, _ = run(ours, [tokens, *following(3)], batch_cache(ours, padding))
    want, _ = run(stock, [tokens, *following(3)], batch_cache(stock, padding))
    for i in range(len(LENGTHS)):
        assert rrmse(got[i, padding[i] :], want[i, padding[i] :]) <= 1e-5


def test_the_caches_are_mlx_lms_own(family):
    model = qwen_metal.accelerate(tiny(family))
    kinds = [type(c) for c in make_prompt_cache(model)]
    assert kinds == [type(c) for c in make_prompt_cache(tiny(family))]
