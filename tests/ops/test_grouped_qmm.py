"""grouped_qmm and gather_sum against float64 of the dequantised weights."""

import float64 as truth
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequence_cases import DTYPES, poisoned

from qwen_metal.ops.grouped_qmm import gather_sum, grouped_qmm, reference, reference_gather_sum
from qwen_metal.ops.matrix import Matrix
from qwen_metal.ops.route_plan import route_plan


def ids_of(rng, rows, experts, top_k):
    ids = [rng.permutation(experts)[:top_k] for _ in range(rows)]
    return mx.array(np.array(ids, np.uint32).reshape(rows, top_k))


def exact(x, matrices, plan, scores=None, gathered=True):
    order, experts = np.array(plan.order), np.array(plan.experts)
    h = truth.double(x)[order // plan.top_k if gathered else slice(None)]
    ys = []
    for m in matrices:
        y = np.einsum("pk,pnk->pn", h, truth.values(m)[experts])
        ys.append(y if m.bias is None else y + truth.double(m.bias)[experts])
    if len(ys) == 2:
        return truth.silu(ys[0]) * ys[1]
    return ys[0] if scores is None else ys[0] * truth.double(scores).reshape(-1)[order][:, None]


@pytest.mark.parametrize("form", truth.QUANTISED + truth.DENSE, ids=str)
def test_formats(form, isa):
    rng = np.random.default_rng(1)
    gate, up = (truth.random_matrix(rng, (3, 37, 128), form, bias=True) for _ in range(2))
    down = truth.random_matrix(rng, (3, 19, 128), form)
    plan = route_plan(ids_of(rng, 13, 3, 2), 3)
    x = truth.random_rows(rng, (13, 128), mx.bfloat16)
    truth.check(grouped_qmm(x, (gate, up), plan), exact(x, (gate, up), plan), truth.PREFILL)
    rows = truth.random_rows(rng, (26, 128), mx.float32)
    scores = truth.random_rows(rng, (13, 2), mx.float32)
    y = grouped_qmm(rows, (down,), plan, scores)
    truth.check(y, exact(rows, (down,), plan, scores, gathered=False), truth.PREFILL)


@pytest.mark.parametrize("rows", (0, 1, 7, 31, 33, 63, 65, pytest.param(1000, marks=pytest.mark.slow)))
def test_rows(rows, isa):
    rng = np.random.default_rng(rows)
    gate, up = (truth.random_matrix(rng, (9, 51, 192), ("affine", 4, 64)) for _ in range(2))
    for top_k in (1, 3):
        plan = route_plan(ids_of(rng, rows, 9, top_k), 9)
        x = truth.random_rows(rng, (rows, 192), mx.bfloat16)
        y = grouped_qmm(x, (gate, up), plan)
        assert y.shape == (rows * top_k, 51) and y.dtype == mx.float32
        truth.check(y, exact(x, (gate, up), plan), truth.PREFILL)


def test_uneven(isa):
    """No token to most experts; every token to one, more than a block of rows."""
    rng = np.random.default_rng(2)
    m = truth.random_matrix(rng, (64, 17, 64), ("affine", 4, 64))
    for ids in (mx.array([[63, 0]]), mx.full((300, 1), 5, mx.uint32), mx.full((3, 2), 7, mx.uint32)):
        plan = route_plan(ids, 64)
        x = truth.random_rows(rng, (ids.shape[0], 64), mx.float32)
        rows = x[plan.order // plan.top_k]
        y = grouped_qmm(rows, (m,), plan)
        truth.check(y, exact(rows, (m,), plan, gathered=False), truth.PREFILL)


def test_experts_that_are_views():
    """Experts sliced out of a larger array are read where they lie; scattered rows are copied."""
    rng = np.random.default_rng(3)
    big = truth.random_matrix(rng, (8, 64, 128), ("affine", 4, 64))
    plan = route_plan(ids_of(rng, 11, 3, 2), 3)
    x = truth.random_rows(rng, (22, 128), mx.float32)
    for cut in (
        (slice(2, 5),),
        (slice(0, 6, 2), slice(10, 40)),
        (slice(5, 8), slice(None, None, 3)),
    ):
        m = Matrix(*(a[cut] if isinstance(a, mx.array) else a for a in big))
        truth.check(grouped_qmm(x, (m,), plan), exact(x, (m,), plan, gathered=False), truth.PREFILL)
    # Gate and up as halves of one fused array.
    gate, up = (
        Matrix(*(a[:3, cut] if isinstance(a, mx.array) else a for a in big))
        for cut in (slice(0, 32), slice(32, 64))
    )
    x = truth.random_rows(rng, (11, 128), mx.float32)
    truth.check(grouped_qmm(x, (gate, up), plan), exact(x, (gate, up), plan), truth.PREFILL)


def test_global_scale_of_each_expert():
    rng = np.random.default_rng(4)
    m = truth.random_matrix(rng, (3, 16, 64), ("nvfp4", 4, 16))
    m = m._replace(global_scale=mx.array([0.5, 1.7, 0.03]))
    plan = route_plan(ids_of(rng, 9, 3, 1), 3)
    x = truth.random_rows(rng, (9, 64), mx.float32)
    truth.check(grouped_qmm(x, (m,), plan), exact(x, (m,), plan, gathered=False), truth.PREFILL)


def test_gather_sum():
    rng = np.random.default_rng(5)
    for rows, top_k in ((0, 2), (1, 1), (7, 3), (65, 8)):
        plan = route_plan(ids_of(rng, rows, 9, top_k), 9)
        y = truth.random_rows(rng, (rows * top_k, 33), mx.float32)
        total = truth.double(y)[np.array(plan.inverse)].reshape(rows, top_k, 33).sum(axis=1)
        truth.check(gather_sum(y, plan), total, truth.PREFILL)
        shared, residual = (truth.random_rows(rng, (rows, 33), mx.bfloat16) for _ in range(2))
        wanted = total + truth.double(shared) + truth.double(residual)
        for dtype in (None, mx.bfloat16):
            got = gather_sum(y, plan, shared, residual, dtype)
            assert got.dtype == (dtype or mx.float32)
            truth.check(got, wanted, truth.PREFILL)


def test_the_same_bits_twice_and_no_rubbish():
    rng = np.random.default_rng(6)
    m = truth.random_matrix(rng, (9, 51, 192), ("affine", 4, 64))
    plan = route_plan(ids_of(rng, 65, 9, 3), 9)
    x = truth.random_rows(rng, (65, 192), mx.bfloat16)
    poisoned(lambda: gather_sum(grouped_qmm(x, (m, m), plan), plan))


def test_gradients():
    rng = np.random.default_rng(7)
    gate, up, down = (truth.random_matrix(rng, (4, 64, 64), ("affine", 4, 64)) for _ in range(3))
    plan = route_plan(ids_of(rng, 5, 4, 2), 4)
    x, scores = truth.random_rows(rng, (5, 64), mx.float32), truth.random_rows(rng, (5, 2), mx.float32)

    def loss(qmm, total):
        def of(x, scores):
            h = qmm(x, (gate, up), plan)
            return total(qmm(h, (down,), plan, scores), plan).square().sum()

        return mx.grad(of, (0, 1))(x, scores)

    for got, wanted in zip(loss(grouped_qmm, gather_sum), loss(reference, reference_gather_sum)):
        assert mx.allclose(got, wanted, rtol=1e-4, atol=1e-7)


def test_errors():
    rng = np.random.default_rng(8)
    m = truth.random_matrix(rng, (4, 16, 64), ("affine", 4, 64))
    plan = route_plan(ids_of(rng, 5, 4, 2), 4)
    x = truth.random_rows(rng, (5, 64), mx.float32)
    scores = mx.ones((5, 2))
    for call in (
        lambda: grouped_qmm(x[:, :32], (m,), plan),
        lambda: grouped_qmm(x[:3], (m,), plan),
        lambda: grouped_qmm(x, (m, m), plan, scores),
        lambda: grouped_qmm(x, (m, m, m), plan),
        lambda: grouped_qmm(x, (m,), plan, scores[:2]),
        lambda: grouped_qmm(x, (m._replace(weight=m.weight[0]),), plan),
        lambda: grouped_qmm(x, (m,), route_plan(ids_of(rng, 5, 3, 2), 3)),
        lambda: gather_sum(x, plan),
        lambda: gather_sum(mx.ones((10, 3)), plan, shared=mx.ones((5, 4))),
    ):
        with pytest.raises(ValueError):
            call()


def test_a_plan_of_other_rows_reads_nothing_outside():
    rng = np.random.default_rng(9)
    m = truth.random_matrix(rng, (4, 16, 64), ("affine", 4, 64))
    plan = route_plan(ids_of(rng, 5, 4, 2), 4)
    x = truth.random_rows(rng, (10, 64), mx.float32)
    for bad in (
        plan._replace(order=plan.order + 100),
        plan._replace(offsets=plan.offsets[::-1]),
        plan._replace(offsets=plan.offsets * 1000),
        plan._replace(inverse=plan.inverse + 100),
    ):
        with pytest.raises(RuntimeError, match="plan"):
            mx.eval(grouped_qmm(x, (m,), bad), gather_sum(x, bad))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fuzz(data):
    """Any rows, experts, formats, slices: a right answer or a ValueError."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    form = draw(st.sampled_from(truth.QUANTISED + truth.DENSE))
    experts, rows = draw(st.integers(1, 6)), draw(st.integers(0, 40))
    top_k = draw(st.integers(1, experts))
    columns, outputs = 128 * draw(st.integers(1, 2)), draw(st.integers(1, 60))
    m = truth.random_matrix(rng, (experts + 1, outputs + 2, columns), form)
    cut = draw(st.sampled_from([(slice(1, None),), (slice(0, -1), slice(2, None)), (slice(None),)]))
    m = Matrix(*(a[cut] if isinstance(a, mx.array) else a for a in m))
    plan = route_plan(ids_of(rng, rows, experts, top_k), experts)
    dtype = draw(st.sampled_from(DTYPES))
    x = truth.random_rows(rng, (rows * top_k, 2 * columns), dtype)
    x = draw(st.sampled_from([x[:, :columns], x[:, ::2], x[: rows * top_k - 1, :columns], x]))
    try:
        y = grouped_qmm(x, (m,), plan)
    except ValueError:
        return
    truth.near(y, exact(x, (m,), plan, gathered=False), columns)
