"""gated_delta_step against float64: dtypes, padding, ended rows, donation, views, gradients."""

import mlx.core as mx
import numpy as np
import pytest
import sequence64 as truth
from hypothesis import given, settings, strategies as st
from sequence_cases import DTYPES, delta_weights, ext, normal, poisoned, same_gradient

from qwen_metal.ops import gated_delta_step as module
from qwen_metal.ops.gated_delta_step import gated_delta_step


def case(B, w, dtype, window=True, state=True):
    C, hv, dv = w.conv.shape[0], w.num_v_heads, w.head_v_dim
    return (
        normal(1, B, 1, C, dtype=dtype),
        normal(2, B, 1, hv * dv, dtype=dtype),
        normal(3, B, 1, hv, dtype=dtype),
        normal(4, B, 1, hv, dtype=dtype),
        normal(5, B, w.conv.shape[1] - 1, C, dtype=dtype) if window else None,
        normal(6, B, hv, dv, w.head_k_dim) if state else None,
    )


def check(inputs, w, padding=None, lengths=None):
    y, window, state = gated_delta_step(*inputs, w, padding, lengths)
    wanted, window64, state64, live = truth.delta_step(*inputs, w, padding, lengths)
    dtype = inputs[0].dtype
    assert y.dtype == window.dtype == dtype and state.dtype == mx.float32
    if live.any():
        truth.assert_close(y[mx.array(np.flatnonzero(live))], wanted[live])
    assert np.array_equal(truth.exact(window), truth.rounded(window64, dtype))
    truth.assert_close(state, state64)
    for row in np.flatnonzero(~live):  # kept exactly
        before = 0 if inputs[5] is None else np.array(inputs[5][int(row)])
        assert np.array_equal(np.array(state[int(row)]), np.broadcast_to(before, state.shape[1:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B", [1, 3])
def test_dtypes(dtype, B, isa):
    w = delta_weights(2, 4, 128, 128, dtype)
    check(case(B, w, dtype), w)


@pytest.mark.parametrize("heads", [(1, 3, 16, 16), (2, 2, 48, 80), (3, 3, 20, 36), (1, 8, 64, 32)])
def test_head_sizes(heads, isa):
    w = delta_weights(*heads, mx.float32)
    check(case(2, w, mx.float32), w)
    check(case(2, w, mx.float32, window=False, state=False), w)


@pytest.mark.parametrize("state", [True, False])
def test_padding_and_lengths(state):
    w = delta_weights(2, 4, 32, 32, mx.bfloat16)
    inputs = case(4, w, mx.bfloat16, state=state)
    check(inputs, w, mx.array([0, 1, -2, 5]))
    check(inputs, w, None, mx.array([1, 0, -3, 7]))
    check(inputs, w, mx.array([0, 1, 0, 1]), mx.array([1, 1, 0, 0]))


def test_a_row_that_does_not_count_is_as_in_mlx_lm():
    """Window and state of padded and ended rows, bit for bit those of the stock path."""
    w = delta_weights(2, 4, 32, 32, mx.float32)
    inputs = case(4, w, mx.float32)
    rows = mx.array([0, 1, 0, 1]), mx.array([1, 1, 0, 0])
    _, window, state = gated_delta_step(*inputs, w, *rows)
    _, window_stock, state_stock = module.reference(*inputs, w, *rows, numerics="match")
    assert mx.array_equal(window, window_stock)
    assert mx.array_equal(state[1:], state_stock[1:])


def test_the_state_is_updated_in_place_only_when_nobody_holds_it():
    w = delta_weights(2, 4, 64, 64, mx.float32)
    inputs = case(1, w, mx.float32)
    before = np.array(inputs[5])
    mx.eval(gated_delta_step(*inputs, w))
    assert np.array_equal(before, np.array(inputs[5]))

    state = inputs[5] + 1
    mx.eval(state)
    place = np.array(state, copy=False).__array_interface__["data"][0]
    y, _, state = gated_delta_step(*inputs[:5], state, w)
    mx.eval(y, state)
    assert np.array(state, copy=False).__array_interface__["data"][0] == place


def test_many_steps_do_not_drift():
    w = delta_weights(1, 2, 32, 32, mx.float32)
    window = state = window64 = state64 = None
    for t in range(64):
        inputs = [normal(10 * t + i, 1, 1, n) for i, n in enumerate((w.conv.shape[0], 64, 2, 2))]
        y, window, state = gated_delta_step(*inputs, window, state, w)
        wanted, window64, state64, _ = truth.delta_step(*inputs, window64, state64, w)
        truth.assert_close(y, wanted, relative=2e-6)
    truth.assert_close(state, state64)


def test_views(isa):
    w = delta_weights(2, 4, 32, 32, mx.bfloat16)
    qkv, z, b, a, window, state = case(2, w, mx.bfloat16)
    wide = mx.concatenate([qkv, z, b, a], axis=-1)
    n = [qkv.shape[2], z.shape[2], b.shape[2]]
    parts = mx.split(wide, [n[0], n[0] + n[1], sum(n)], axis=-1)
    check((*parts, window[::-1], state.swapaxes(2, 3)), w)


def test_every_output_is_written():
    w = delta_weights(1, 2, 20, 36, mx.float32)
    inputs = case(3, w, mx.float32)
    poisoned(lambda: gated_delta_step(*inputs, w, mx.array([0, 1, 0]), mx.array([1, 1, 0])))


def test_gradient_is_the_stock_path_s():
    w = delta_weights(1, 2, 16, 16, mx.float32)
    inputs = case(1, w, mx.float32)

    def loss(function):
        return lambda qkv, z, conv, state: sum(
            o.sum() for o in function(qkv, z, *inputs[2:5], state, w._replace(conv=conv))
        )

    stock = lambda *a: module.reference(*a, numerics="match")  # noqa: E731
    same_gradient(loss(gated_delta_step), loss(stock), (inputs[0], inputs[1], w.conv, inputs[5]))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_fuzz(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    Hk, Hv = draw((1, 1), (1, 4), (2, 2), (2, 6))
    dtype = draw(*DTYPES)
    w = delta_weights(Hk, Hv, draw(8, 33), draw(5, 16), dtype, draw(1, 2, 4))
    B = draw(0, 1, 3)
    inputs = list(case(B, w, dtype, draw(True, False), draw(True, False)))
    spoiled = draw(None, None, 0, 1, 2, 3, 4, 5)
    if spoiled is None or inputs[spoiled] is None:
        if B:
            check(inputs, w)
        return
    inputs[spoiled] = draw(inputs[spoiled][..., :-1], inputs[spoiled].astype(mx.int32))
    try:
        mx.eval(ext.gated_delta_step(*inputs, w, None, None))
    except ValueError:
        return
    pytest.fail("took an input that does not fit")
