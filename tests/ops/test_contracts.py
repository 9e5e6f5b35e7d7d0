"""The contract of each operation, and its precise reference against float64 arithmetic.

The references are what kernels are judged by, so they are checked here against something else:
plain numpy in float64 on the dequantised weights. What is asked is error over size (RMSE), so that
a wrong order of rounding shows and one large element does not hide it.
"""

import inspect
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from models.agree import numpy, rrmse

from qwen_metal import ops
from qwen_metal.ops import (
    attention_prefill,
    attention_prepare,
    embed,
    gated_delta_chunk,
    gated_delta_prepare,
    gated_delta_scan,
    gated_delta_step,
    gated_norm,
    gqa_decode,
    grouped_qmm,
    kv_append,
    moe_decode,
    projections,
    route_plan,
    route_topk,
)
from qwen_metal.ops.attention_prepare import Rope
from qwen_metal.ops.gated_delta_prepare import DeltaWeights
from qwen_metal.ops.gqa_decode import QuantisedKV
from qwen_metal.ops.gradient import stock_gradient
from qwen_metal.ops.matrix import FORMATS, Matrix, Norm
from qwen_metal.policy import Policy
from qwen_metal.routes import Unsupported

STOCK = Policy(kernels="stock")
FLOAT32 = 3e-6  # relative RMSE of a float32 result against float64

ALL_FORMATS = [(mode, bits, group) for (mode, bits), groups in FORMATS.items() for group in groups]
ALL_FORMATS += [("float", 0, 0)]
NAMED = [f"{m} {b}-bit group {g}" for m, b, g in ALL_FORMATS]


# --- made-up inputs and float64 meanings ------------------------------------------------------


def normal(*shape, seed=0, scale=1.0, dtype=mx.float32) -> mx.array:
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def matrix(rows, columns, fmt=("affine", 4, 64), experts=None, seed=0, dtype=mx.float32, bias=False) -> Matrix:
    """Random weights of a format, of one layer or of several experts."""
    mode, bits, group = fmt
    lead = () if experts is None else (experts,)
    weight = normal(*lead, rows, columns, seed=seed, scale=columns**-0.5, dtype=dtype)
    added = normal(*lead, rows, seed=seed + 50, dtype=dtype) if bias else None
    if mode == "float":
        return Matrix(weight, bias=added)
    packed, scales, *biases = mx.quantize(weight, group, bits, mode=mode)
    return Matrix(packed, scales, biases[0] if biases else None, added, None, group, bits, mode)


def exact(m: Matrix) -> np.ndarray:
    return numpy(m.dequantised(mx.float32))


def rms(x: np.ndarray, norm: Norm) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * numpy(norm.weight)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# --- the form every operation has -------------------------------------------------------------


@pytest.mark.parametrize("name", ops.NAMES)
def test_each_operation_has_its_four_parts(name):
    module = getattr(ops, name)
    public = getattr(module, name)
    assert callable(module.reference) and callable(module.supported)
    assert inspect.signature(public).parameters["policy"].default == Policy()
    assert inspect.signature(module.supported).parameters["policy"].default == Policy()
    text = inspect.getdoc(public)
    assert "Source:" in text
    if "Arguments, results and errors are those of" not in text:
        assert all(part in text for part in ("Args:", "Returns:", "Raises:"))
        assert "(B," in text or "(R" in text or "(..." in text or "any shape" in text, "shapes"
    assert inspect.getdoc(module) and inspect.getdoc(module.reference)


def test_names_are_the_files():
    import pkgutil

    helpers = {"gradient", "matrix"}
    assert {m.name for m in pkgutil.iter_modules(ops.__path__)} - helpers == set(ops.NAMES)


@pytest.mark.parametrize("name", ops.NAMES)
def test_the_stock_policy_is_a_reason_everywhere(name):
    # supported() answers None or why not; a policy that asks for stock is always why not.
    call = {
        "embed": (mx.array([0]), matrix(4, 64)),
        "projections": (normal(2, 64), [matrix(4, 64)]),
        "gated_delta_prepare": (normal(1, 1, 64), delta_weights(2, 4, 8, 8)),
        "gated_delta_scan": (normal(1, 1, 2, 8), normal(1, 1, 2, 8)),
        "gated_delta_chunk": (normal(1, 1, 2, 8), normal(1, 1, 2, 8)),
        "gated_delta_step": (normal(1, 1, 64), delta_weights(2, 4, 8, 8)),
        "gated_norm": (normal(2, 8), normal(2, 8)),
        "attention_prepare": (normal(1, 1, 64), Rope.of(nn.RoPE(8))),
        "kv_append": (KVCache(), normal(1, 1, 1, 8)),
        "gqa_decode": (normal(1, 2, 1, 64), normal(1, 1, 4, 64)),
        "attention_prefill": (normal(1, 2, 3, 64), normal(1, 1, 4, 64)),
        "route_topk": (normal(2, 8), 2),
        "route_plan": (mx.array([[0, 1]]), 4),
        "grouped_qmm": (normal(2, 64), [matrix(4, 64, experts=2)], route_plan.reference(mx.array([[0], [1]]), 2)),
        "moe_decode": (normal(1, 64), experts(4), mx.array([[0, 1]]), mx.ones((1, 2))),
    }[name]
    assert getattr(ops, name).supported(*call, policy=STOCK) == "policy: kernels='stock'"


# --- projections and embed --------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=NAMED)
@pytest.mark.parametrize("rows, columns, outputs", [(1, 128, 37), (7, 384, 65), (33, 128, 1)])
def test_projections(fmt, rows, columns, outputs):
    x, norm = normal(rows, columns), Norm(1 + normal(columns, seed=1, scale=0.1), 1e-6)
    m, other = matrix(outputs, columns, fmt, bias=True), matrix(3, columns, seed=9)
    got, second = projections.reference(x, [m, other], norm)
    h = rms(numpy(x), norm)
    assert rrmse(got, h @ exact(m).T + numpy(m.bias)) <= FLOAT32
    assert rrmse(second, h @ exact(other).T) <= FLOAT32


def test_projections_residual_dtype_and_leading_axes():
    x, m, r = normal(2, 3, 128, dtype=mx.bfloat16), matrix(5, 128), normal(2, 3, 5)
    got = projections.reference(x, [m], residual=r, dtype=mx.float32)[0]
    assert got.dtype == mx.float32
    assert rrmse(got, numpy(x) @ exact(m).T + numpy(r)) <= FLOAT32
    assert projections.reference(x, [m])[0].dtype == mx.bfloat16


def test_the_bias_term_is_summed_in_float32():
    # mlx 4631, 4516: with activations all of one sign the affine bias needs their sum, and that
    # sum in bfloat16 costs 3 to 12 times the error. Here: the precise reference has none of it.
    x, m = mx.abs(normal(5, 4096, dtype=mx.bfloat16)) + 1, matrix(16, 4096)
    want = numpy(x) @ exact(m).T
    assert rrmse(projections.reference(x, [m], dtype=mx.float32)[0], want) <= FLOAT32


@pytest.mark.parametrize("scale", [1e-7, 6e-5, 1.0, 3e4])
def test_very_small_and_very_large_scales(scale):
    x, m = normal(3, 128), matrix(7, 128)
    m = m._replace(scales=m.scales * scale, biases=m.biases * scale)
    assert rrmse(projections.reference(x, [m])[0], numpy(x) @ exact(m).T) <= FLOAT32


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=NAMED)
def test_embed(fmt):
    table, ids = matrix(37, 128, fmt), mx.array([[0, 36, 5], [5, 1, 36]])
    got = embed.embed(ids, table, STOCK)
    assert got.shape == (2, 3, 128)
    # mx.dequantize of the floating-point formats answers in bfloat16.
    assert rrmse(got, exact(table)[np.array(ids)]) <= (4e-3 if got.dtype == mx.bfloat16 else FLOAT32)


def test_a_matrix_reads_its_own_module():
    # Bits and group of the module, not of the checkpoint.
    layer = nn.QuantizedLinear(128, 8, bias=True, group_size=32, bits=3)
    m = Matrix.of(layer)
    assert (m.bits, m.group_size, m.rows, m.columns, m.format) == (3, 32, 8, 128, "affine 3-bit group 32")
    assert m.weight is layer.weight and m.bias is layer.bias, "nothing is copied"
    assert Matrix.of(nn.Linear(8, 4, bias=False)).format == "float32"
    with pytest.raises(Unsupported, match="a Conv1d layer has no fused kernel"):
        Matrix.of(nn.Conv1d(1, 1, 1))


# --- routing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("count, top_k", [(32, 8), (256, 8), (5, 5), (7, 1)])
def test_route_topk(count, top_k, normalise):
    logits = normal(9, count, scale=3)
    ids, scores = route_topk.reference(logits, top_k, normalise)
    gates = softmax(numpy(logits))
    want = np.argsort(-gates, axis=-1)[:, :top_k]
    assert ids.dtype == mx.uint32 and (np.array(ids) == want).all()
    kept = np.take_along_axis(gates, want, -1)
    assert rrmse(scores, kept / kept.sum(-1, keepdims=True) if normalise else kept) <= FLOAT32


def test_of_equal_logits_the_highest_index_wins():
    logits = mx.array([[1.0, 2, 2, 1, 2, 1, 0, 1]])
    assert route_topk.reference(logits, 5)[0].tolist() == [[4, 2, 1, 7, 5]]
    # And the same experts as mlx-lm's own choice in a tie across the boundary.
    ids, _ = route_topk.reference(logits, 5, numerics="match")
    assert sorted(ids.tolist()[0]) == [1, 2, 4, 5, 7]


def test_a_nan_logit_leaves_valid_distinct_experts():
    logits = mx.array([[math.nan, 1, 3, math.nan, 2], [math.nan] * 5])
    ids, _ = route_topk.reference(logits, 3)
    assert ids.tolist()[0] == [2, 4, 1]
    assert all(len(set(row)) == 3 and max(row) < 5 for row in ids.tolist())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_route_plan_invariants(data):
    count = data.draw(st.integers(1, 40), "experts")
    rows, top_k = data.draw(st.integers(1, 33), "rows"), data.draw(st.integers(1, 8), "top_k")
    tile = data.draw(st.sampled_from([16, 32, 64]), "tile")
    ids = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=rows * top_k, max_size=rows * top_k)))
    plan = route_plan.reference(mx.array(ids.reshape(rows, top_k)), count, tile)
    pairs = rows * top_k
    order, inverse, chosen, offsets, blocks = (np.array(t).astype(np.int64) for t in plan[:5])
    assert (order == np.argsort(ids, kind="stable")).all(), "sorted, equal experts in the order of their rows"
    assert (order[inverse] == np.arange(pairs)).all() and (chosen == ids[order]).all()
    assert (np.diff(offsets) == np.bincount(ids, minlength=count)).all(), "histogram"
    assert offsets[0] == 0 and offsets[-1] == pairs
    assert len(blocks) == -(-pairs // tile) + min(count, pairs)
    real = blocks[:, 0] != route_plan.SENTINEL
    assert (blocks[~real, 1] == pairs).all() and not real[real.argmin() :].any() or real.all()
    covered = []
    for expert, start in blocks[real]:
        end = min(start + tile, offsets[expert + 1])
        assert offsets[expert] <= start < end, "a block lies within its expert and is not empty"
        covered += range(start, end)
    assert covered == list(range(pairs)), "each row is in exactly one block"


# --- experts ----------------------------------------------------------------------------------


def experts(count, fmt=("affine", 4, 64), hidden=64, width=64) -> moe_decode.Experts:
    return moe_decode.Experts(
        matrix(width, hidden, fmt, count, 1), matrix(width, hidden, fmt, count, 2), matrix(hidden, width, fmt, count, 3)
    )


def moe64(x, e, ids, scores) -> np.ndarray:
    """Routed experts of each row, one by one."""
    gate, up, down = (exact(m) for m in e)
    out = np.zeros_like(x)
    for r, (chosen, weights) in enumerate(zip(np.array(ids), numpy(scores))):
        for i, s in zip(chosen, weights):
            out[r] += s * (down[i] @ (silu(gate[i] @ x[r]) * (up[i] @ x[r])))
    return out


EXPERT_FORMATS = [f for f in ALL_FORMATS if f[2] in (0, 16, 64) or f == ("mxfp4", 4, 32)]


@pytest.mark.parametrize("fmt", EXPERT_FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 33])
def test_grouped_qmm_and_gather_sum(fmt, rows):
    x, e = normal(rows, 64), experts(5, fmt)
    ids, scores = route_topk.reference(normal(rows, 5, seed=4), 3)
    plan = route_plan.reference(ids, 5)
    shared, residual = normal(rows, 64, seed=5), normal(rows, 64, seed=6)
    act = grouped_qmm.reference(x, (e.gate, e.up), plan)
    assert act.shape == (rows * 3, 64) and act.dtype == mx.float32
    y = grouped_qmm.reference(act, (e.down,), plan, scores)
    got = grouped_qmm.reference_gather_sum(y, plan, shared, residual)
    assert rrmse(got, moe64(numpy(x), e, ids, scores) + numpy(shared) + numpy(residual)) <= FLOAT32
    again = grouped_qmm.reference_gather_sum(y, plan, shared, residual)
    assert mx.array_equal(got, again)


def test_grouped_qmm_of_one_matrix_without_scores():
    x, e = normal(4, 64), experts(5)
    ids = mx.array([[4, 0], [1, 1], [0, 3], [2, 4]])
    plan = route_plan.reference(ids, 5)
    got = numpy(grouped_qmm.reference(x, (e.up,), plan))
    order = np.array(plan.order)
    want = np.stack([exact(e.up)[np.array(ids).ravel()[p]] @ numpy(x)[p // 2] for p in order])
    assert rrmse(got, want) <= FLOAT32


@pytest.mark.parametrize("fmt", EXPERT_FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 8])
def test_moe_decode(fmt, rows):
    x, e, norm = normal(rows, 64), experts(5, fmt), Norm(1 + normal(64, seed=7, scale=0.1), 1e-6)
    ids, scores = route_topk.reference(normal(rows, 5, seed=4), 3)
    shared = moe_decode.Shared(
        normal(rows, 1, seed=8), normal(rows, 64, seed=9), normal(rows, 64, seed=10), matrix(64, 64, fmt, seed=11)
    )
    residual = normal(rows, 64, seed=12)
    got = moe_decode.reference(x, e, ids, scores, norm, shared, residual)
    own = sigmoid(numpy(shared.gate_logit)) * ((silu(numpy(shared.gate)) * numpy(shared.up)) @ exact(shared.down).T)
    want = moe64(rms(numpy(x), norm), e, ids, scores) + own + numpy(residual)
    assert rrmse(got, want) <= FLOAT32
    plain = moe_decode.reference(rms_of(x, norm), e, ids, scores)
    assert rrmse(plain, moe64(rms(numpy(x), norm), e, ids, scores)) <= FLOAT32


def rms_of(x, norm):
    return mx.fast.rms_norm(x, norm.weight, norm.eps)


@pytest.mark.parametrize("numerics", ["precise", "match"])
def test_moe_decode_answers_in_the_dtype_of_x(numerics):
    # Also when another operation's kernel handed float32 scores and shared rows to the stock path:
    # a float32 answer would widen every later layer and its cache.
    x, e = normal(2, 64, dtype=mx.bfloat16), experts(5)
    shared = moe_decode.Shared(normal(2, 1), normal(2, 64), normal(2, 64), matrix(64, 64))
    got = moe_decode.reference(x, e, mx.array([[0, 1], [2, 3]]), mx.ones((2, 2)), None, shared, x, numerics)
    assert got.dtype == mx.bfloat16


# --- Gated DeltaNet ---------------------------------------------------------------------------


def delta_weights(Hk, Hv, Dk, Dv, taps=4) -> DeltaWeights:
    channels = 2 * Hk * Dk + Hv * Dv
    return DeltaWeights(
        normal(channels, taps, 1, seed=20, scale=0.5), normal(Hv, seed=21), normal(Hv, seed=22),
        1 + normal(Dv, seed=23, scale=0.1), Hk, Hv, Dk, Dv, 1e-6,
    )  # fmt: skip


def prepare64(qkv, a, b, window, w, mask=None, lengths=None):
    """Float64: convolution window by window, SiLU, norms and gates."""
    B, T, C = qkv.shape
    kept = w.conv.shape[1] - 1
    if mask is not None:
        qkv = np.where(mask[..., None], qkv, 0)
    line = np.concatenate([np.zeros((B, kept, C)) if window is None else window, qkv], 1)
    taps = numpy(w.conv)[..., 0].T
    mixed = silu(np.stack([(line[:, t : t + kept + 1] * taps).sum(1) for t in range(T)], 1))
    keys = w.num_k_heads * w.head_k_dim
    q, k = (mixed[..., i * keys : (i + 1) * keys].reshape(B, T, w.num_k_heads, -1) for i in range(2))
    v = mixed[..., 2 * keys :].reshape(B, T, w.num_v_heads, -1)
    q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
    g = np.exp(-np.exp(numpy(w.A_log)) * np.log1p(np.exp(a + numpy(w.dt_bias))))
    ends = np.full(B, T) if lengths is None else np.clip(lengths, 0, T)
    after = np.stack([line[i, e : e + kept] for i, e in enumerate(ends)])
    return q * w.head_k_dim**-0.5, k, v, g, sigmoid(b), after


def scan64(q, k, v, g, beta, state, mask=None):
    """Float64: the recurrence, token by token."""
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    q, k = (np.repeat(t, Hv // Hk, 2) for t in (q, k))
    S = np.zeros((B, Hv, Dv, Dk)) if state is None else state.copy()
    ys = np.zeros((B, T, Hv, Dv))
    for t in range(T):
        new = g[:, t, :, None, None] * S
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", new, k[:, t]))
        new = new + delta[..., None] * k[:, t, :, None]
        ys[:, t] = np.einsum("bhvk,bhk->bhv", new, q[:, t])
        S = new if mask is None else np.where(mask[:, t, None, None, None], new, S)
    return ys, S


@pytest.mark.parametrize("tokens", [1, 3, 7, 33])
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_gated_delta_prepare(tokens, padding):
    w, B = delta_weights(2, 4, 8, 16), 3
    C = w.conv.shape[0]
    qkv, a, b = normal(B, tokens, C), normal(B, tokens, 4, seed=1), normal(B, tokens, 4, seed=2)
    window, mask, lengths = normal(B, 3, C, seed=3), None, None
    if padding == "left":
        mask = gated_delta_prepare.live_rows(tokens, mx.array([0, 2, tokens]), None)
    if padding == "right":
        lengths = mx.array([tokens, 1, -2])
        mask = gated_delta_prepare.live_rows(tokens, None, lengths)
    got = gated_delta_prepare.reference(qkv, a, b, window, w, mask, lengths)
    want = prepare64(
        numpy(qkv), numpy(a), numpy(b), numpy(window), w,
        None if mask is None else np.array(mask), None if lengths is None else np.array(lengths),
    )  # fmt: skip
    for name, one, other in zip(("q", "k", "v", "g", "beta", "window"), got, want):
        assert rrmse(one, other) <= FLOAT32, name
    first = gated_delta_prepare.reference(qkv, a, b, None, w)
    for one, other in zip(first, prepare64(numpy(qkv), numpy(a), numpy(b), None, w)):
        assert rrmse(one, other) <= FLOAT32


def test_live_rows():
    rows = gated_delta_prepare.live_rows
    assert rows(3, None, None) is None
    assert rows(3, mx.array([1, -4]), None).tolist() == [[False, True, True], [True] * 3]
    assert rows(3, None, mx.array([2, 0])).tolist() == [[True, True, False], [False] * 3]
    assert rows(3, mx.array([1, 0]), mx.array([2, 3])).tolist() == [[False, True, False], [True] * 3]


def recurrence(T, B=2, Hk=2, Hv=4, Dk=16, Dv=8, decay=(0.2, 1.0), seed=0):
    q, k = (normal(B, T, Hk, Dk, seed=seed + i) for i in (0, 1))
    q, k = (t / mx.sqrt((t * t).sum(-1, keepdims=True)) for t in (q, k))
    key = mx.random.key(seed + 7)
    g = mx.random.uniform(*decay, (B, T, Hv), key=key)
    beta = mx.random.uniform(0, 1, (B, T, Hv), key=mx.random.key(seed + 8))
    return q * Dk**-0.5, k, normal(B, T, Hv, Dv, seed=seed + 2), g, beta


@pytest.mark.parametrize("fn", [gated_delta_scan.reference, gated_delta_chunk.reference], ids=["scan", "chunk"])
@pytest.mark.parametrize("tokens", [1, 7, 31, 33, 63, 64, 65, 130])
def test_recurrence(fn, tokens):
    args, state = recurrence(tokens), normal(2, 4, 8, 16, seed=9)
    mask = mx.array(np.random.default_rng(tokens).random((2, tokens)) < 0.7)
    for kept, live in ((None, None), (state, None), (state, mask)):
        y, after = fn(*args, kept, live)
        wanted = scan64(*map(numpy, args), None if kept is None else numpy(kept), None if live is None else np.array(live))
        assert after.dtype == mx.float32
        assert rrmse(after, wanted[1]) <= FLOAT32
        seen = np.ones((2, tokens), bool) if live is None else np.array(live)  # y of a skipped token is undefined
        if seen.any():
            assert rrmse(numpy(y)[seen], wanted[0][seen]) <= FLOAT32


@pytest.mark.parametrize("decay", [(1e-30, 1e-4), (0.0, 0.0), (0.999, 1.0), (1.0, 1.0)], ids=str)
def test_chunk_equals_scan_over_4096_tokens(decay):
    # Decay near 0 overflows a careless chunk (exp of the negative sum), decay near 1 never forgets.
    args = recurrence(4096, B=1, Hk=1, Hv=1, Dk=16, Dv=4, decay=decay)
    y, state = gated_delta_chunk.reference(*args)
    want_y, want_state = scan64(*map(numpy, args), None)
    assert rrmse(y, want_y) <= 2e-5 and rrmse(state, want_state) <= 2e-5


@pytest.mark.parametrize("chunk", [1, 16, 63, 64])
def test_chunk_of_any_length(chunk):
    args = recurrence(130)
    y, state = gated_delta_chunk.reference(*args, chunk=chunk)
    want = scan64(*map(numpy, args), None)
    assert rrmse(y, want[0]) <= FLOAT32 and rrmse(state, want[1]) <= FLOAT32


@pytest.mark.parametrize("case", ["fresh", "going on", "left padding", "ended"])
def test_gated_delta_step(case):
    B, w = 3, delta_weights(2, 4, 16, 8)
    C = w.conv.shape[0]
    qkv, z = normal(B, 1, C), normal(B, 1, 32, seed=1)
    b, a = normal(B, 1, 4, seed=2), normal(B, 1, 4, seed=3)
    window, state = (None, None) if case == "fresh" else (normal(B, 3, C, seed=4), normal(B, 4, 8, 16, seed=5))
    padding = mx.array([0, 2, -1]) if case == "left padding" else None
    lengths = mx.array([1, 0, -3]) if case == "ended" else None
    y, new_window, new_state = gated_delta_step.reference(qkv, z, b, a, window, state, w, padding, lengths)
    live = gated_delta_prepare.live_rows(1, padding, lengths)
    live = None if live is None else np.array(live)
    *inputs, want_window = prepare64(
        numpy(qkv), numpy(a), numpy(b), None if window is None else numpy(window), w,
        live, None if lengths is None else np.array(lengths),
    )  # fmt: skip
    o, want_state = scan64(*inputs, None if state is None else numpy(state), live)
    want = (rms(o, Norm(w.norm, w.eps)) * silu(numpy(z).reshape(o.shape))).reshape(B, 1, -1)
    seen = np.ones(B, bool) if live is None else live[:, 0]
    assert rrmse(numpy(y)[seen], want[seen]) <= FLOAT32
    assert rrmse(new_window, want_window) <= FLOAT32 and rrmse(new_state, want_state) <= FLOAT32
    if live is not None:
        for i in np.flatnonzero(~live[:, 0]):
            assert mx.array_equal(new_state[int(i)], state[int(i)]), "a row that does not count keeps its state"


@pytest.mark.parametrize("width", [8, 31, 128])
def test_gated_norm(width):
    y, z, norm = normal(3, 2, width), normal(3, 2, width, seed=1), Norm(1 + normal(width, seed=2, scale=0.1), 1e-6)
    got = gated_norm.reference(y, z, norm)
    assert rrmse(got, rms(numpy(y), norm) * silu(numpy(z))) <= FLOAT32


@pytest.mark.parametrize("numerics", ["precise", "match"])
def test_gated_norm_answers_in_the_dtype_asked_for(numerics):
    y, z, norm = normal(3, 8), normal(3, 8, dtype=mx.bfloat16), Norm(mx.ones(8), 1e-6)
    assert gated_norm.reference(y, z, norm, mx.bfloat16, numerics).dtype == mx.bfloat16
    assert gated_norm.reference(y, z, norm, None, numerics).dtype == mx.float32


# --- attention --------------------------------------------------------------------------------


def rope64(x, dims, base, positions, scale=1.0):
    """Float64: halves rotated against each other; x (B, H, T, D), positions (B, T)."""
    half = dims // 2
    angle = positions[:, None, :, None] * scale * base ** (-np.arange(half) / half)
    one, two, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([one * cos - two * sin, one * sin + two * cos, rest], -1)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens, offset", [(1, 0), (7, 0), (5, 37), (3, "rows")])
def test_attention_prepare(tokens, offset, gated):
    B, Hq, Hkv, D, dims = 2, 4, 2, 16, 8
    q, k, v = (normal(B, tokens, n, seed=i) for i, n in enumerate((Hq * D * (1 + gated), Hkv * D, Hkv * D)))
    q_norm, k_norm = (Norm(1 + normal(D, seed=s, scale=0.1), 1e-6) for s in (5, 6))
    at = mx.array([2, 11]) if offset == "rows" else offset
    rope = Rope.of(nn.RoPE(dims, base=1000.0))
    assert (rope.dims, rope.base, rope.scale) == (dims, 1000.0, 1.0)
    got = attention_prepare.reference(q, k, v, q_norm, k_norm, rope, Hq, Hkv, at, gated)
    positions = np.broadcast_to(np.array(at).reshape(-1, 1) + np.arange(tokens), (B, tokens))
    heads = numpy(q).reshape(B, tokens, Hq, -1)
    want_q = rope64(rms(heads[..., :D], q_norm).swapaxes(1, 2), dims, 1000.0, positions)
    want_k = rope64(rms(numpy(k).reshape(B, tokens, Hkv, D), k_norm).swapaxes(1, 2), dims, 1000.0, positions)
    assert rrmse(got[0], want_q) <= FLOAT32 and rrmse(got[1], want_k) <= FLOAT32
    assert rrmse(got[2], numpy(v).reshape(B, tokens, Hkv, D).swapaxes(1, 2)) == 0
    assert (got[3] is None) == (not gated)
    if gated:
        assert rrmse(got[3], heads[..., D:].reshape(B, tokens, -1)) == 0


def test_another_rope_is_read_but_not_served():
    from mlx_lm.models.rope_utils import YarnRoPE

    rope = Rope.of(YarnRoPE(8, scaling_factor=2.0))
    assert rope.base is None and rope.dims == 8
    assert attention_prepare.supported(normal(1, 1, 8), rope) == "YarnRoPE has no fused kernel"


def attention64(q, k, v, scale, allowed, gate=None):
    """Float64: softmax over the allowed keys (B, T, S), a group of heads a KV head."""
    B, H, T, D = q.shape
    k, v = (np.repeat(t, H // t.shape[1], 1) for t in (k, v))
    scores = np.where(allowed[:, None], scale * q @ k.swapaxes(-1, -2), -np.inf)
    o = (softmax(scores) @ v).swapaxes(1, 2).reshape(B, T, -1)
    return o if gate is None else o * sigmoid(gate)


@pytest.mark.parametrize("length", [1, 5, 33, 257])
@pytest.mark.parametrize("start", [None, [0, 3]])
@pytest.mark.parametrize("packed", [None, 8, 4])
def test_gqa_decode(length, start, packed):
    if start is not None and length <= 3:
        start = [0, 0]
    B, H, Hkv, D = 2, 6, 2, 64
    q, k, v = normal(B, H, 1, D), normal(B, Hkv, length, D, seed=1), normal(B, Hkv, length, D, seed=2)
    gate = normal(B, 1, H * D, seed=3)
    keys, values, quantised = k, v, None
    if packed:
        quantised = QuantisedKV(64, packed)
        keys, values = (tuple(mx.quantize(t, 64, packed)) for t in (k, v))
        k, v = (gqa_decode.dequantised(t, quantised) for t in (keys, values))
    first = np.zeros(B) if start is None else np.array(start)
    allowed = np.arange(length) >= first[:, None, None]
    want = attention64(numpy(q), numpy(k), numpy(v), 0.125, allowed, numpy(gate))
    mask = mx.array(allowed)[:, None]
    assert rrmse(gqa_decode.reference(q, keys, values, 0.125, mask, gate, quantised), want) <= FLOAT32
    # The public function turns a start into that mask; in float32 the stock path is as near.
    begin = None if start is None else mx.array(start)
    got = gqa_decode.gqa_decode(q, keys, values, 0.125, begin, None, gate, quantised, STOCK)
    assert rrmse(got, want) <= FLOAT32


@pytest.mark.parametrize("tokens, length", [(1, 1), (7, 7), (5, 38), (65, 65)])
@pytest.mark.parametrize("start", [None, [0, 2]])
def test_attention_prefill(tokens, length, start):
    B, H, Hkv, D = 2, 4, 1, 32
    q, k, v = normal(B, H, tokens, D), normal(B, Hkv, length, D, seed=1), normal(B, Hkv, length, D, seed=2)
    gate = normal(B, tokens, H * D, seed=3)
    position = np.arange(length - tokens, length)
    first = np.zeros(B) if start is None else np.array(start)
    allowed = (np.arange(length) <= position[:, None]) & (np.arange(length) >= first[:, None, None])
    live = allowed.any(-1)  # a row of padding has no key to read
    want = attention64(numpy(q), numpy(k), numpy(v), 0.2, allowed | ~live[..., None], numpy(gate))
    begin = None if start is None else mx.array(start)
    got = attention_prefill.attention_prefill(q, k, v, 0.2, begin, "causal", gate, policy=STOCK)
    if live.any():
        assert rrmse(numpy(got)[live], want[live]) <= FLOAT32
    mask = mx.array(allowed | ~live[..., None])[:, None]
    assert rrmse(attention_prefill.reference(q, k, v, 0.2, mask, gate), want) <= FLOAT32
    if start is None:
        every = attention64(numpy(q), numpy(k), numpy(v), 0.2, np.ones_like(allowed))
        got = attention_prefill.attention_prefill(q, k, v, 0.2, mask=None, policy=STOCK)
        assert rrmse(got, every) <= FLOAT32
        assert rrmse(attention_prefill.reference(q, k, v, 0.2, "causal", gate), want) <= FLOAT32


@pytest.mark.parametrize("make", [KVCache, QuantizedKVCache, lambda: RotatingKVCache(8), lambda: BatchKVCache([0, 1])])
def test_kv_append_leaves_what_the_cache_itself_leaves(make):
    ours, stock = make(), make()
    for i, tokens in enumerate((5, 1, 1, 7)):
        k, v = normal(2, 2, tokens, 64, seed=i), normal(2, 2, tokens, 64, seed=i + 9)
        got, want = kv_append.kv_append(ours, k, v), stock.update_and_fetch(k, v)
        assert str(got) == str(want)
        assert str(vars(ours)) == str(vars(stock))


# --- what is refused, and how -----------------------------------------------------------------

X, IDS = normal(2, 64), mx.array([[0, 1], [2, 3]])
REC = recurrence(3)
PLAN = route_plan.reference(IDS, 5)

REFUSED = {
    "embed: float ids": (lambda: embed.embed(normal(2), matrix(4, 64)), "embed: ids is .*float32, supported are integer"),
    "projections: int x": (lambda: projections.projections(IDS, [matrix(4, 64)]), "projections: x is .*int32, supported are bfloat16, float16 and float32"),
    "projections: columns": (lambda: projections.projections(X, [matrix(4, 128)]), "projections: x has 64 columns, the weight has 128"),
    "projections: none": (lambda: projections.projections(X, []), "projections: got 0 matrices"),
    "projections: residual": (lambda: projections.projections(X, [matrix(4, 64)] * 2, residual=X), "got 2 matrices and a residual, supported is one"),
    "route_topk": (lambda: route_topk.route_topk(X, 65), "route_topk: top_k is 65, supported are 1 to 64"),
    "route_topk: 0": (lambda: route_topk.route_topk(X, 0), "route_topk: top_k is 0"),
    "route_plan: float": (lambda: route_plan.route_plan(X, 4), "route_plan: ids is .*float32 .*supported is an integer matrix"),
    "route_plan: tile": (lambda: route_plan.route_plan(IDS, 4, 48), "tile_rows is 48, supported are 16, 32, 64"),
    "grouped_qmm: int": (lambda: grouped_qmm.grouped_qmm(IDS, [matrix(4, 64, experts=5)], PLAN), "grouped_qmm: x is .*int32"),
    "grouped_qmm: three": (lambda: grouped_qmm.grouped_qmm(X, experts(5), PLAN), "got 3 matrices and no scores, supported are"),
    "grouped_qmm: scores": (lambda: grouped_qmm.grouped_qmm(X, experts(5)[:2], PLAN, mx.ones((2, 2))), "got 2 matrices and scores"),
    "grouped_qmm: columns": (lambda: grouped_qmm.grouped_qmm(X, [matrix(4, 128, experts=5)], PLAN), "x has 64 columns, the weight has 128"),
    "moe_decode: rows": (lambda: moe_decode.moe_decode(normal(9, 64), experts(5), IDS, mx.ones((2, 2))), r"x is \(9, 64\).*R up to 8"),
    "moe_decode: scores": (lambda: moe_decode.moe_decode(X, experts(5), IDS, mx.ones((2, 3))), r"scores \(2, 3\); supported are"),
    "moe_decode: columns": (lambda: moe_decode.moe_decode(normal(2, 128), experts(5), IDS, mx.ones((2, 2))), "x has 128 columns"),
    "prepare: channels": (lambda: gated_delta_prepare.gated_delta_prepare(normal(1, 1, 60), X, X, None, delta_weights(2, 4, 8, 8)), "qkv has 60 channels, the convolution has 64"),
    "scan: heads": (lambda: gated_delta_scan.gated_delta_scan(REC[0], REC[1], REC[2][:, :, :3], *REC[3:]), r"gated_delta_scan: q \(2, 3, 2, 16\).*Hv a multiple of Hk"),
    "scan: gates": (lambda: gated_delta_scan.gated_delta_scan(*REC[:3], REC[3][:, :2], REC[4]), r"g \(2, 2, 4\).*supported is \(2, 3, 4\)"),
    "scan: state": (lambda: gated_delta_scan.gated_delta_scan(*REC, normal(2, 4, 8, 16, dtype=mx.bfloat16)), r"state is .*bfloat16 \(2, 4, 8, 16\), supported is float32"),
    "chunk: state": (lambda: gated_delta_chunk.gated_delta_chunk(*REC, normal(2, 4, 16, 8)), r"gated_delta_chunk: state is .*supported is float32 \(2, 4, 8, 16\)"),
    "step: tokens": (lambda: gated_delta_step.gated_delta_step(normal(1, 2, 64), X, X, X, None, None, delta_weights(2, 4, 8, 8)), "got 2 tokens, supported is 1"),
    "gated_norm": (lambda: gated_norm.gated_norm(X, normal(2, 32), Norm(mx.ones(64), 1e-6)), r"y is \(2, 64\), z is \(2, 32\), supported are equal"),
    "attention_prepare": (lambda: attention_prepare.attention_prepare(normal(1, 1, 60), X[None], X[None], Norm(mx.ones(16), 0.0), Norm(mx.ones(16), 0.0), Rope.of(nn.RoPE(8)), 4, 4), "q has 60 columns, k 64; supported are 128 and 64"),
    "kv_append": (lambda: kv_append.kv_append(KVCache(), normal(1, 1, 2, 8), normal(1, 1, 3, 8)), r"k is \(1, 1, 2, 8\), v is \(1, 1, 3, 8\)"),
    "gqa_decode: tokens": (lambda: gqa_decode.gqa_decode(normal(1, 4, 2, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), 1.0), "q is .* over 2 KV heads, supported are one token"),
    "gqa_decode: heads": (lambda: gqa_decode.gqa_decode(normal(1, 3, 1, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), 1.0), "a multiple of the KV heads"),
    "gqa_decode: both": (lambda: gqa_decode.gqa_decode(normal(1, 2, 1, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), 1.0, mx.array([0]), mx.ones((5,), mx.bool_)), "a start and a mask, supported is one of them"),
    "prefill: keys": (lambda: attention_prefill.attention_prefill(normal(1, 2, 6, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), 1.0), "5 keys, supported are .* at least as many keys"),
    "prefill: start": (lambda: attention_prefill.attention_prefill(normal(1, 2, 3, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), 1.0, mx.array([0]), None), "a start goes with mask='causal' only"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# --- gradient of a fused operation ------------------------------------------------------------


def fast(x, m, residual):
    """A stand-in kernel: plainly another value, and no gradient anyone would want."""
    return [mx.stop_gradient(100 * x[..., :1] + mx.zeros((x.shape[0], m.rows)))]


def meaning(x, m, residual):
    return projections.reference(x, [m], residual=residual)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_values_of_the_kernel_gradient_of_the_reference(compiled, residual):
    x, m, r = normal(3, 128), matrix(5, 128), normal(3, 5, seed=2) if residual else None

    def value(x, scales, r):
        return stock_gradient(fast, meaning, (x, m._replace(scales=scales), r))[0]

    def by_reference(x, scales, r):
        return (meaning(x, m._replace(scales=scales), r)[0] * cotangent).sum()

    cotangent = normal(3, 5, seed=3)
    wrap = mx.compile if compiled else (lambda f: f)
    argnums = (0, 1, 2) if residual else (0, 1)
    got = wrap(mx.grad(lambda *a: (value(*a) * cotangent).sum(), argnums))(x, m.scales, r)
    want = mx.grad(by_reference, argnums)(x, m.scales, r)
    assert mx.array_equal(wrap(value)(x, m.scales, r), fast(x, m, r)[0])
    for one, other in zip(got, want):
        assert rrmse(one, other) <= FLOAT32 and mx.abs(other).max() > 0


def test_integers_get_zeros_and_none_passes():
    x, m = normal(3, 128), matrix(5, 128)
    seen = []

    def watching(x, m, residual):
        seen.append((type(m), m.bits, m.mode, m.bias, residual))
        return fast(x, m, residual)

    def total(weight):
        return stock_gradient(watching, meaning, (x, m._replace(weight=weight), None))[0].sum()

    out, tangents = mx.vjp(total, [m.weight], [mx.array(1.0)])
    assert tangents[0].shape == m.weight.shape and not mx.any(tangents[0]).item()
    # The trees reach the kernel as they were given: names, numbers and None.
    assert set(seen) == {(Matrix, 4, "affine", None, None)}


def test_any_tree_of_arguments_passes():
    rope, weights = Rope.of(nn.RoPE(8)), {"a": [normal(2), (mx.array([1]), "text")]}

    def look(*arguments):
        assert arguments[0].module is rope.module and arguments[2] == 3
        assert arguments[1]["a"][1][1] == "text" and isinstance(arguments[1]["a"][1], tuple)
        return [arguments[1]["a"][0] * 2]

    got = stock_gradient(look, look, (rope, weights, 3))[0]
    assert mx.array_equal(got, weights["a"][0] * 2)


def test_gradient_of_a_bare_array():
    # A kernel of one output may answer with the array itself, as its reference does.
    a, c = normal(3, 2), normal(3, 2, seed=1)
    got = mx.grad(lambda a: (c * stock_gradient(lambda a: a * 0, lambda a: a * a, [a])).sum())(a)
    assert rrmse(got, 2 * numpy(a) * numpy(c)) <= FLOAT32


def test_gradient_beside_an_integer_output():
    # mx.vjp pairs no cotangent with a stop_gradient output: the scores' one went to the ids, and
    # the router learnt nothing. And the ids are constants to whatever gathers by them.
    logits, table, c = normal(4, 7), normal(7, 3, seed=1), normal(4, 2, 3, seed=2)

    def route(logits):
        return list(route_topk.reference(logits, 2))

    def total(route):
        def of(logits):
            ids, scores = route(logits)
            picked = mx.gather_mm(logits[:, None, None, :3], mx.stack([table.T[:, :3]] * 7), rhs_indices=ids)
            return (c[..., :3] * picked.squeeze(-2) * scores[..., None]).sum()

        return of

    got = mx.grad(total(lambda x: stock_gradient(route, route, [x])))(logits)
    want = mx.grad(total(route))(logits)
    assert rrmse(got, want) <= FLOAT32 and mx.abs(want[:, 3:]).max().item() > 0


def test_gradient_with_several_outputs():
    def two(a, b):
        return [mx.stop_gradient(a * 0), mx.stop_gradient(b * 0 + 7)]

    def reference(a, b):
        return [a * b, a + b]

    def total(a, b):
        one, other = stock_gradient(two, reference, (a, b))
        return (one + 2 * other).sum()

    a, b = normal(4), normal(4, seed=1)
    assert total(a, b).item() == 56
    grads = mx.grad(total, (0, 1))(a, b)
    assert rrmse(grads[0], numpy(b) + 2) <= FLOAT32 and rrmse(grads[1], numpy(a) + 2) <= FLOAT32
