"""moe_decode against float64 of the dequantised weights."""

import float64 as truth
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequence_cases import DTYPES, poisoned

from qwen_metal.ops import moe_decode as module
from qwen_metal.ops.matrix import Matrix, Norm
from qwen_metal.ops.moe_decode import Experts, Shared, moe_decode


def case(rng, rows=1, experts=9, top_k=3, columns=192, inner=128, form=("affine", 4, 64), dtype=mx.bfloat16):
    ex = Experts(
        *(truth.random_matrix(rng, (experts, inner, columns), form, scale=0.1) for _ in range(2)),
        truth.random_matrix(rng, (experts, columns, inner), form, scale=0.1),
    )
    x = truth.random_rows(rng, (rows, columns), dtype)
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(rows)], np.uint32)
    return x, ex, mx.array(ids.reshape(rows, top_k)), mx.array(rng.random((rows, top_k), np.float32))


def shared_of(rng, rows, columns, inner, form, dtype, gated=True):
    return Shared(
        truth.random_rows(rng, (rows, 1), mx.float32) if gated else None,
        truth.random_rows(rng, (rows, inner), dtype),
        truth.random_rows(rng, (rows, inner), dtype),
        truth.random_matrix(rng, (columns, inner), form),
    )


def exact(x, ex, ids, scores, norm=None, shared=None, residual=None):
    h = truth.double(x)
    if norm is not None:
        h = truth.rms_norm(h, norm.weight, norm.eps)
    gate, up, down = (truth.values(m) for m in ex)
    y = np.zeros(x.shape)
    for r, row in enumerate(np.array(ids)):
        for e, score in zip(row, truth.double(scores)[r]):
            y[r] += score * (down[e] @ (truth.silu(gate[e] @ h[r]) * (up[e] @ h[r])))
    if shared is not None:
        s = truth.matmul(truth.silu(truth.double(shared.gate)) * truth.double(shared.up), shared.down)
        y += s if shared.gate_logit is None else s / (1 + np.exp(-truth.double(shared.gate_logit)))
    return y if residual is None else y + truth.double(residual)


@pytest.mark.parametrize("form", truth.QUANTISED + truth.DENSE, ids=str)
def test_formats(form, isa):
    rng = np.random.default_rng(1)
    for dtype in (mx.bfloat16, mx.float32):
        arguments = case(rng, 2, 5, 2, 128, 128, form, dtype)
        truth.check(moe_decode(*arguments), exact(*arguments), truth.DECODE)


@pytest.mark.parametrize("rows", range(9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(rows, dtype, isa):
    rng = np.random.default_rng(rows)
    arguments = case(rng, rows, dtype=dtype)
    norm = Norm(truth.random_rows(rng, (192,), dtype), 1e-6)
    shared = shared_of(rng, rows, 192, 64, ("affine", 8, 64), dtype, gated=rows % 2 == 0)
    residual = truth.random_rows(rng, (rows, 192), dtype)
    y = moe_decode(*arguments, norm, shared, residual)
    assert y.shape == (rows, 192) and y.dtype == dtype
    truth.check(y, exact(*arguments, norm, shared, residual), truth.DECODE)


def test_rows_that_share_an_expert(isa):
    """All rows to one expert; an expert twice in a row; all experts to one row."""
    rng = np.random.default_rng(2)
    for ids in ([[4]] * 8, [[1, 1, 1]] * 8, [list(range(9))]):
        x, ex, _, _ = case(rng, len(ids))
        scores = mx.array(rng.random((len(ids), len(ids[0])), np.float32))
        arguments = x, ex, mx.array(ids), scores
        truth.check(moe_decode(*arguments), exact(*arguments), truth.DECODE)


def test_experts_that_are_views():
    rng = np.random.default_rng(3)
    x, ex, ids, scores = case(rng, 2, experts=16)
    few = Experts(*(Matrix(*(a[4:13] if isinstance(a, mx.array) else a for a in m)) for m in ex))
    arguments = x, few, mx.minimum(ids, 8), scores
    truth.check(moe_decode(*arguments), exact(*arguments), truth.DECODE)


def test_mixed_formats():
    rng = np.random.default_rng(4)
    x, ex, ids, scores = case(rng, 3)
    ex = ex._replace(down=truth.random_matrix(rng, (9, 192, 128), ("affine", 3, 64)))
    truth.check(moe_decode(x, ex, ids, scores), exact(x, ex, ids, scores), truth.DECODE)


def test_ids_outside_are_an_error_and_no_crash():
    x, ex, ids, scores = case(np.random.default_rng(5))
    for bad in (9, 1 << 30, -1):
        with pytest.raises(RuntimeError, match="outside"):
            mx.eval(moe_decode(x, ex, mx.full(ids.shape, bad, mx.int32), scores))
    mx.eval(moe_decode(x, ex, ids, scores))  # the stream still works


def test_no_rubbish_and_the_same_bits_on_two_python_threads():
    import threading

    arguments = case(np.random.default_rng(6), 4)
    poisoned(lambda: moe_decode(*arguments))
    wanted, wrong = np.array(moe_decode(*arguments).astype(mx.float32)), []

    def work():
        # Streams belong to the thread that uses them.
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(30):
                got = np.array(moe_decode(*arguments).astype(mx.float32))
                if not np.array_equal(got, wanted):
                    wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_gradients_and_compile():
    rng = np.random.default_rng(7)
    x, ex, ids, scores = case(rng, 2, dtype=mx.float32)
    shared = shared_of(rng, 2, 192, 64, ("affine", 4, 64), mx.float32)
    norm = Norm(truth.random_rows(rng, (192,), mx.float32), 1e-6)

    def gradient(f, **more):
        def loss(x, scores, gate):
            return f(x, ex, ids, scores, norm, shared._replace(gate=gate), x, **more).square().sum()

        return mx.grad(loss, (0, 1, 2))(x, scores, shared.gate)

    for got, wanted in zip(gradient(moe_decode), gradient(module.reference, numerics="match")):
        assert mx.allclose(got, wanted, rtol=1e-3, atol=1e-5)
    step = mx.compile(lambda x: moe_decode(x, ex, ids, scores) * 2)
    assert mx.array_equal(step(x), moe_decode(x, ex, ids, scores) * 2)


def test_errors():
    rng = np.random.default_rng(8)
    x, ex, ids, scores = case(rng, 2)
    shared = shared_of(rng, 2, 192, 64, ("affine", 4, 64), mx.bfloat16)
    for call in (
        lambda: moe_decode(mx.zeros((9, 192)), ex, ids, scores),
        lambda: moe_decode(x[:, :64], ex, ids, scores),
        lambda: moe_decode(x, ex._replace(down=ex.gate), ids, scores),
        lambda: moe_decode(x, ex, ids[:1], scores[:1]),
        lambda: moe_decode(x, ex, ids, scores[:, :2]),
        lambda: moe_decode(x, ex, ids.astype(mx.float32), scores),
        lambda: moe_decode(x, ex, ids, scores, residual=x[:, :3]),
        lambda: moe_decode(x, ex, ids, scores, shared=shared._replace(up=shared.up[:1])),
        lambda: moe_decode(x, ex, ids, scores, shared=shared._replace(down=ex.gate)),
    ):
        with pytest.raises(ValueError):
            call()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fuzz(data):
    """Any rows, experts, formats, strides: a right answer or a ValueError."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    experts, rows = draw(st.integers(1, 6)), draw(st.integers(0, 9))
    top_k = draw(st.integers(1, experts))
    form = draw(st.sampled_from(truth.QUANTISED + truth.DENSE))
    dtype = draw(st.sampled_from(DTYPES))
    x, ex, ids, scores = case(rng, rows, experts, top_k, 128, 128, form, dtype)
    wide = mx.concatenate([x, x], axis=-1)
    x = draw(st.sampled_from([x, wide[:, 128:], wide[:, ::2], wide, mx.broadcast_to(wide[:1, :128], x.shape) if rows else x]))
    ids = draw(st.sampled_from([ids, ids.astype(mx.int64), mx.broadcast_to(ids[:, :1], ids.shape)]))
    try:
        y = moe_decode(x, ex, ids, scores)
    except ValueError:
        return
    truth.check(y, exact(x, ex, ids, scores), truth.DECODE)
