"""projections against float64 of the dequantised weights."""

import float64 as truth
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequence_cases import DTYPES, poisoned, same_gradient

from qwen_metal import Policy, routes
from qwen_metal.ops import projections as module
from qwen_metal.ops.matrix import Matrix, Norm
from qwen_metal.ops.projections import projections
from qwen_metal.routes import Unsupported, strict

FORMS = truth.QUANTISED + truth.DENSE
ROWS = (0, 1, 7, 31, 33, 63, 65)


def exact(x, m, norm=None, residual=None):
    h = truth.double(x)
    if norm is not None:
        h = truth.rms_norm(h, norm.weight, norm.eps)
    y = truth.matmul(h, m)
    return y if residual is None else truth.double(residual) + y


def allowed(x):
    return truth.DECODE if x.size // max(x.shape[-1], 1) <= 8 else truth.PREFILL


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_formats(form, isa):
    rng = np.random.default_rng(1)
    m = truth.random_matrix(rng, (37, 256), form, bias=True)
    for dtype in DTYPES:
        for rows in (1, 5, 11):
            x = truth.random_rows(rng, (rows, 256), dtype, positive=rows == 5)
            truth.check(projections(x, [m])[0], exact(x, m), allowed(x))


@pytest.mark.parametrize("rows", ROWS + (pytest.param(1000, marks=pytest.mark.slow),))
@pytest.mark.parametrize("bits", (4, 8))
def test_rows(rows, bits, isa):
    rng = np.random.default_rng(rows)
    m = truth.random_matrix(rng, (131, 384), ("affine", bits, 64))
    for dtype in (mx.bfloat16, mx.float32):
        x = truth.random_rows(rng, (rows, 384), dtype)
        y = projections(x, [m])[0]
        assert y.shape == (rows, 131) and y.dtype == dtype
        truth.check(y, exact(x, m), allowed(x))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 17), (33, 100), (9, 2049), (2, 4097)])
@pytest.mark.parametrize("form", truth.DENSE)
def test_odd_columns(shape, form, isa):
    rng = np.random.default_rng(2)
    rows, columns = shape
    m = truth.random_matrix(rng, (7, columns), form, bias=True)
    x = truth.random_rows(rng, (rows, columns), mx.float32)
    truth.check(projections(x, [m])[0], exact(x, m), truth.PREFILL)


@pytest.mark.parametrize("outputs", (1, 2, 3, 5, 47, 49, 97))
def test_odd_outputs(outputs, isa):
    rng = np.random.default_rng(3)
    for rows in (1, 2, 4, 8, 9, 25):
        m = truth.random_matrix(rng, (outputs, 128), ("affine", 4, 64))
        x = truth.random_rows(rng, (rows, 128), mx.float32)
        truth.check(projections(x, [m])[0], exact(x, m), truth.PREFILL)


@pytest.mark.parametrize("columns", (64, 192, 1024, 1088, 2048, 4160))
def test_columns(columns, isa):
    rng = np.random.default_rng(4)
    for bits in (4, 8):
        m = truth.random_matrix(rng, (9, columns), ("affine", bits, 64))
        for rows in (1, 3, 13, 30):
            x = truth.random_rows(rng, (rows, columns), mx.float32)
            truth.check(projections(x, [m])[0], exact(x, m), truth.PREFILL)


@pytest.mark.parametrize("rows", (1, 8, 9, 40))
def test_mixed_formats_norm_and_float32_outputs(rows, isa):
    """The decode step's first launch: an 8-bit router beside 4-bit weights, one norm, fp32 out."""
    rng = np.random.default_rng(5)
    forms = [("affine", 4, 64), ("affine", 8, 64), "bfloat16", ("mxfp4", 4, 32), ("affine", 4, 32)]
    ms = [truth.random_matrix(rng, (n, 256), f) for n, f in zip((33, 16, 1, 8, 5), forms)]
    norm = Norm(truth.random_rows(rng, (256,), mx.bfloat16), 1e-6)
    x = truth.random_rows(rng, (rows, 256), mx.bfloat16)
    for dtype in (None, mx.float32):
        for y, m in zip(projections(x, ms, norm, dtype=dtype), ms):
            truth.check(y, exact(x, m, norm), truth.DECODE)


def test_residual():
    rng = np.random.default_rng(6)
    m = truth.random_matrix(rng, (65, 128), ("affine", 4, 64))
    for rows in (1, 33):
        x = truth.random_rows(rng, (rows, 128), mx.bfloat16)
        residual = truth.random_rows(rng, (rows, 65), mx.bfloat16)
        y = projections(x, [m], residual=residual)[0]
        truth.check(y, exact(x, m, residual=residual), truth.DECODE)


def test_scales_of_another_dtype(isa):
    rng = np.random.default_rng(7)
    for scale_dtype in DTYPES:
        for form in (("affine", 4, 64), ("affine", 3, 32)):
            m = truth.random_matrix(rng, (17, 128), form, dtype=scale_dtype)
            for dtype in DTYPES:
                x = truth.random_rows(rng, (2, 128), dtype)
                truth.check(projections(x, [m])[0], exact(x, m), truth.DECODE)


def test_global_scale():
    rng = np.random.default_rng(8)
    m = truth.random_matrix(rng, (17, 128), ("nvfp4", 4, 16))._replace(global_scale=mx.array(0.37))
    x = truth.random_rows(rng, (3, 128), mx.float32)
    truth.check(projections(x, [m])[0], exact(x, m), truth.DECODE)


def test_views_of_larger_arrays(isa):
    """Rows and columns cut out of larger arrays, and a broadcast row: read where they lie, or copied."""
    rng = np.random.default_rng(9)
    big = truth.random_matrix(rng, (64, 256), ("affine", 4, 64))
    part = big._replace(
        weight=big.weight[3:40:2], scales=big.scales[3:40:2], biases=big.biases[3:40:2]
    )
    wide = truth.random_rows(rng, (5, 600), mx.float32)
    for x in (wide[:, 100:356], wide[::2, :512:2], mx.broadcast_to(wide[:1, :256], (4, 256))):
        truth.check(projections(x, [part])[0], exact(x, part), truth.DECODE)
        truth.check(projections(x.T.T, [big])[0], exact(x, big), truth.DECODE)


def test_every_element_is_written():
    rng = np.random.default_rng(10)
    m = truth.random_matrix(rng, (131, 192), ("affine", 4, 64))
    for rows in (1, 33):
        x = truth.random_rows(rng, (rows, 192), mx.bfloat16)
        poisoned(lambda: projections(x, [m, m]))


def test_same_bits_with_any_number_of_threads():
    from qwen_metal import extension

    ext, rng = extension.load(), np.random.default_rng(11)
    m = truth.random_matrix(rng, (515, 256), ("affine", 4, 64))
    before = ext.threads()
    try:
        for rows in (1, 300):
            x = truth.random_rows(rng, (rows, 256), mx.float32)
            answers = []
            for threads in (1, 2, 5):
                ext.set_threads(threads)
                answers.append(np.array(projections(x, [m])[0]))
            assert all(np.array_equal(answers[0], a) for a in answers)
    finally:
        ext.set_threads(before)


def test_extreme_scales(isa):
    """Scales below the smallest normal half, and very large ones."""
    rng = np.random.default_rng(12)
    m = truth.random_matrix(rng, (16, 128), ("affine", 4, 64))
    for factor in (1e-8, 1e-3, 1e6, 1e20):
        scaled = m._replace(scales=m.scales * factor, biases=m.biases * factor)
        x = truth.random_rows(rng, (2, 128), mx.bfloat16)
        truth.check(projections(x, [scaled])[0], exact(x, scaled), truth.DECODE)


def test_errors():
    rng = np.random.default_rng(13)
    m = truth.random_matrix(rng, (8, 128), ("affine", 4, 64))
    x = truth.random_rows(rng, (2, 128), mx.float32)
    for call in (
        lambda: projections(x[:, :64], [m]),
        lambda: projections(x, []),
        lambda: projections(x.astype(mx.int32), [m]),
        lambda: projections(x, [m, m], residual=x[:, :8]),
        lambda: projections(x, [m], residual=x),
        lambda: projections(x, [m], Norm(x[0, :64], 1e-6)),
        lambda: projections(x, [m._replace(scales=m.scales[:4])]),
        lambda: projections(x, [m._replace(biases=None)]),
        lambda: projections(x, [m._replace(group_size=128)]),
        lambda: projections(x, [m], dtype=mx.int32),
    ):
        with pytest.raises(ValueError):
            call()


def test_routes_and_policy():
    rng = np.random.default_rng(14)
    m = truth.random_matrix(rng, (8, 128), ("affine", 4, 64))
    x = truth.random_rows(rng, (2, 128), mx.bfloat16)
    routes(reset=True)
    projections(x, [m])
    match = Policy(numerics="match")
    assert "match" in module.supported(x, [m], policy=match)
    y = projections(x, [m], policy=match)[0]
    assert mx.array_equal(y, module.reference(x, [m], numerics="match")[0])
    counts = routes(reset=True)["projections"]
    assert counts["cpu"] == 1 and counts["stock"] == 1
    with strict(True), pytest.raises(Unsupported, match="match"):
        projections(x, [m], policy=match)


def test_gradients():
    rng = np.random.default_rng(15)
    ms = [truth.random_matrix(rng, (n, 128), ("affine", 4, 64)) for n in (8, 3)]
    x = truth.random_rows(rng, (3, 128), mx.float32)
    weight = truth.random_rows(rng, (128,), mx.float32)

    def fast(x, weight):
        return sum(y.square().sum() for y in projections(x, ms, Norm(weight, 1e-6)))

    def stock(x, weight):
        ys = module.reference(x, ms, Norm(weight, 1e-6), numerics="match")
        return sum(y.square().sum() for y in ys)

    got, wanted = (mx.grad(f, (0, 1))(x, weight) for f in (fast, stock))
    for g, w in zip(got, wanted):  # the forward values differ in the last bit, and so the cotangents
        assert mx.allclose(g, w, rtol=1e-4, atol=1e-5)
    linear = [mx.array(rng.normal(size=(3, n)).astype(np.float32)) for n in (8, 3)]
    same_gradient(
        lambda x: sum((y * c).sum() for y, c in zip(projections(x, ms), linear)),
        lambda x: sum(
            (y * c).sum() for y, c in zip(module.reference(x, ms, numerics="match"), linear)
        ),
        [x],
    )


def test_compiled():
    rng = np.random.default_rng(16)
    m = truth.random_matrix(rng, (8, 128), ("affine", 4, 64))
    step = mx.compile(lambda x: projections(x * 2, [m])[0] + 1)
    for rows in (1, 1, 9):
        x = truth.random_rows(rng, (rows, 128), mx.float32)
        assert mx.array_equal(step(x), projections(x * 2, [m])[0] + 1)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_fuzz(data):
    """Any shape, stride, broadcast, dtype and format: a right answer or a ValueError."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    form = draw(st.sampled_from(FORMS))
    group = 1 if isinstance(form, str) else form[2]
    columns = group * draw(st.integers(1, 5)) + draw(st.sampled_from([0, 0, 0, 1]))
    outputs, lead = draw(st.integers(0, 70)), draw(st.sampled_from([(), (1,), (2, 3), (0,), (17,), (1, 9)]))
    columns_of_m = columns if isinstance(form, str) else max(columns // group, 1) * group
    m = truth.random_matrix(rng, (max(outputs, 1) + 3, columns_of_m), form, bias=draw(st.booleans()))
    cut = draw(st.sampled_from([slice(None), slice(0, outputs), slice(None, None, 2), slice(3, None)]))
    m = Matrix(*(a[cut] if isinstance(a, mx.array) else a for a in m))
    dtype = draw(st.sampled_from([*DTYPES, mx.int32]))
    x = truth.random_rows(rng, (*lead, columns * 2), mx.float32).astype(dtype)
    x = draw(st.sampled_from([x[..., :columns], x[..., ::2], x[..., columns:], x]))
    if draw(st.booleans()):
        x = mx.broadcast_to(x[None], (2, *x.shape))
    if draw(st.booleans()) and x.ndim > 1:
        x = x.swapaxes(0, -1)
    norm = draw(st.sampled_from([None, Norm(mx.ones((columns,)), 1e-5)]))
    try:
        y = projections(x, [m], norm)[0]
    except ValueError:
        return
    mx.eval(y)
    truth.near(y, exact(x, m, norm), columns)
