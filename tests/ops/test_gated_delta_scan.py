"""gated_delta_scan against float64: dtypes, odd sizes, masks, long recurrences, views, gradients."""

import mlx.core as mx
import numpy as np
import pytest
import sequence64 as truth
from hypothesis import given, settings, strategies as st
from sequence_cases import DTYPES, LENGTHS, ext, normal, poisoned, same_gradient, uniform

from qwen_metal.ops import gated_delta_scan as module
from qwen_metal.ops.gated_delta_scan import gated_delta_scan


def case(B, T, Hk, Hv, Dk, Dv, dtype=mx.float32, decay=(0.8, 0.999), state=True):
    q, k = (normal(i, B, T, Hk, Dk) for i in (1, 2))
    q, k = (t / mx.linalg.norm(t, axis=-1, keepdims=True) for t in (q, k))
    return (
        (q * Dk**-0.5).astype(dtype),
        k.astype(dtype),
        normal(3, B, T, Hv, Dv, dtype=dtype),
        uniform(4, *decay, B, T, Hv),
        uniform(5, 0, 1, B, T, Hv).astype(dtype),
        normal(6, B, Hv, Dv, Dk) if state else None,
    )


def check(inputs, mask=None, relative=1e-6):
    y, state = gated_delta_scan(*inputs, mask)
    wanted, after = truth.delta_scan(*inputs, mask)
    assert y.dtype == state.dtype == mx.float32
    truth.assert_close(y, wanted, relative=relative)
    truth.assert_close(state, after, relative=relative)


@pytest.mark.parametrize("T", LENGTHS)
def test_lengths(T, isa):
    check(case(2, T, 2, 4, 128, 128))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    check(case(1, 33, 2, 4, 64, 64, dtype))


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize(
    "heads", [(1, 3, 16, 16), (2, 2, 48, 80), (3, 3, 144, 112), (1, 2, 20, 36), (1, 1, 7, 5), (1, 2, 256, 256)]
)
def test_head_sizes(heads, T, isa):
    check(case(2, T, *heads))
    check(case(2, T, *heads, state=False))


@pytest.mark.parametrize("T", [1, 2, 33])
def test_masks(T, isa):
    inputs = case(3, T, 2, 4, 32, 32)
    mask = mx.array(np.random.default_rng(7).random((3, T)) < 0.6)
    check(inputs, mask)
    _, state = gated_delta_scan(*inputs, mx.zeros((3, T), mx.bool_))
    assert mx.array_equal(state, inputs[5])  # bit for bit: nothing counted


@pytest.mark.parametrize("decay", [(0.0, 0.0), (0.0, 1e-3), (0.9995, 1.0), (1.0, 1.0), (1e-30, 1.0)])
def test_long_recurrence(decay):
    """4,096 steps: the decays are kept as a product that must not run out of range."""
    check(case(1, 4096, 1, 2, 16, 32, decay=decay), relative=4e-6)


def test_mixed_decays(isa):
    inputs = list(case(2, 100, 1, 2, 32, 32))
    decay = np.random.default_rng(8).choice([0.0, 1e-38, 1e-8, 0.5, 0.99, 1.0], (2, 100, 2))
    inputs[3] = mx.array(decay.astype(np.float32))
    check(inputs)


def test_not_finite_stays_in_its_head():
    inputs = list(case(1, 5, 1, 2, 16, 16))
    bad = np.array(inputs[3])
    bad[0, 2, 0] = np.nan
    inputs[3] = mx.array(bad)
    y, state = gated_delta_scan(*inputs)
    assert np.isnan(np.array(state)[0, 0]).all() and np.isfinite(np.array(state)[0, 1]).all()
    assert np.isfinite(np.array(y)[0, :2]).all()


def test_views(isa):
    q, k, v, g, beta, state = case(2, 16, 2, 4, 32, 32)
    check((q[:, ::2], k[:, 1::2], v[:, :8], g[:, 8:], beta[:, ::-2], state[::-1]))
    check((q, k, v, mx.broadcast_to(g[:, :1], g.shape), beta, state.swapaxes(2, 3)))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing(shape):
    inputs = case(*shape, 1, 2, 16, 16)
    y, state = gated_delta_scan(*inputs)
    mx.eval(y, state)
    assert y.shape == inputs[2].shape and mx.array_equal(state, inputs[5])


def test_the_state_given_is_not_changed():
    inputs = case(1, 9, 1, 2, 32, 32)
    before = np.array(inputs[5])
    mx.eval(gated_delta_scan(*inputs))
    assert np.array_equal(before, np.array(inputs[5]))


def test_every_output_is_written():
    inputs = case(2, 7, 1, 2, 20, 36)
    poisoned(lambda: gated_delta_scan(*inputs, mx.array([[True] * 7, [False] * 7])))


def test_gradient_is_the_stock_path_s():
    q, k, v, g, beta, state = case(1, 4, 1, 2, 16, 16)

    def loss(function):
        return lambda *a: sum(o.sum() for o in function(*a, beta, state))

    stock = lambda *a: module.stock(*a)  # noqa: E731
    same_gradient(loss(gated_delta_scan), loss(stock), (q, k, v, g))


def test_same_bits_with_any_number_of_threads():
    inputs = case(2, 65, 2, 4, 128, 128)
    results = []
    for threads in (1, 2, 3):
        ext.set_threads(threads)
        results.append([np.array(o) for o in gated_delta_scan(*inputs)])
    ext.set_threads(2)
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_fuzz(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    Hk, Hv = draw((1, 1), (1, 4), (2, 2), (2, 6))
    inputs = list(case(draw(0, 1, 2), draw(0, 1, 5), Hk, Hv, draw(1, 8, 33), draw(1, 16, 31)))
    spoiled = draw(None, None, 0, 1, 2, 3, 4, 5)
    if spoiled is None:
        if inputs[2].size:
            check(inputs)
        return
    inputs[spoiled] = draw(
        inputs[spoiled][..., :-1], inputs[spoiled][None], inputs[spoiled].astype(mx.int32)
    )
    try:
        mx.eval(ext.gated_delta_scan(*inputs, None))
    except ValueError:
        return
    pytest.fail("took an input that does not fit")
