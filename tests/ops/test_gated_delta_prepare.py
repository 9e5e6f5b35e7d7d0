"""gated_delta_prepare against float64: dtypes, odd lengths, masks, windows, views, gradients."""

import mlx.core as mx
import numpy as np
import pytest
import sequence64 as truth
from hypothesis import given, settings, strategies as st
from sequence_cases import DTYPES, LENGTHS, delta_weights, ext, normal, poisoned, same_gradient

from qwen_metal.ops import gated_delta_prepare as module
from qwen_metal.ops.gated_delta_prepare import gated_delta_prepare


def case(B, T, w, dtype, seed=0, window=True):
    C = w.conv.shape[0]
    hv = w.num_v_heads
    return (
        normal(seed, B, T, C, dtype=dtype),
        normal(seed + 1, B, T, hv, dtype=dtype),
        normal(seed + 2, B, T, hv, dtype=dtype),
        normal(seed + 3, B, w.conv.shape[1] - 1, C, dtype=dtype) if window else None,
    )


def check(inputs, w, mask=None, lengths=None):
    got = gated_delta_prepare(*inputs, w, mask, lengths)
    wanted = truth.delta_prepare(*inputs, w, mask, lengths)
    for name, g, t in zip(("q", "k", "v", "g", "beta"), got, wanted):
        assert g.dtype == mx.float32, name
        truth.assert_close(g, t)
    assert got[5].dtype == inputs[0].dtype
    assert np.array_equal(truth.exact(got[5]), truth.rounded(wanted[5], got[5].dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", LENGTHS)
def test_lengths(dtype, T, isa):
    w = delta_weights(2, 4, 32, 48, dtype)
    check(case(2, T, w, dtype), w)


@pytest.mark.parametrize("heads", [(1, 1, 128, 128), (3, 9, 16, 32), (2, 2, 20, 36), (1, 4, 64, 16)])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7])
def test_heads_and_taps(heads, taps):
    w = delta_weights(*heads, mx.float32, taps)
    check(case(2, 5, w, mx.float32), w)


def test_mixed_types():
    w = delta_weights(2, 4, 32, 32, mx.float32)
    w = w._replace(conv=w.conv.astype(mx.bfloat16), dt_bias=w.dt_bias.astype(mx.float16))
    check(case(1, 7, w, mx.bfloat16), w)


@pytest.mark.parametrize("window", [True, False])
def test_masks_and_lengths(window):
    w = delta_weights(2, 4, 32, 32, mx.float32)
    inputs = case(4, 9, w, mx.float32, window=window)
    left = mx.arange(9) >= mx.array([0, 3, 9, 1])[:, None]
    check(inputs, w, left)
    lengths = mx.array([9, 0, 1, 5])
    check(inputs, w, mx.arange(9) < lengths[:, None], lengths)
    check(inputs, w, None, mx.array([20, -3, 2, 9]))


def test_views(isa):
    w = delta_weights(2, 4, 32, 32, mx.bfloat16)
    qkv, a, b, window = case(2, 14, w, mx.bfloat16)
    check((qkv[:, ::2], a[:, 1::2], b[:, 7:], window[::-1]), w)
    check((mx.broadcast_to(qkv[:1, :7], (2, 7, qkv.shape[2])), a[:, :7], b[:, :7], window), w)


def test_no_tokens():
    w = delta_weights(2, 4, 32, 32, mx.float32)
    check(case(2, 0, w, mx.float32), w)


def test_every_output_is_written():
    w = delta_weights(2, 4, 32, 32, mx.float32)
    inputs = case(2, 7, w, mx.float32)
    poisoned(lambda: gated_delta_prepare(*inputs, w, mx.zeros((2, 7), mx.bool_)))


def test_gradient_is_the_stock_path_s():
    w = delta_weights(1, 2, 16, 16, mx.float32)
    inputs = case(1, 3, w, mx.float32)
    same_gradient(
        lambda qkv, a, conv: sum(
            o.sum() for o in gated_delta_prepare(qkv, a, inputs[2], None, w._replace(conv=conv))
        ),
        lambda qkv, a, conv: sum(
            o.sum()
            for o in module.reference(
                qkv, a, inputs[2], None, w._replace(conv=conv), numerics="match"
            )
        ),
        (inputs[0], inputs[1], w.conv),
    )


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_fuzz(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    dtype = draw(*DTYPES)
    w = delta_weights(draw(1, 2), draw(1, 2, 4, 6), draw(8, 16, 33), draw(5, 16), dtype, draw(2, 4))
    B, T = draw(0, 1, 3), draw(0, 1, 6)
    inputs = list(case(B, T, w, dtype, window=draw(True, False)))
    spoiled = draw(None, None, None, 0, 1, 3)
    if spoiled is not None and inputs[spoiled] is not None:
        inputs[spoiled] = inputs[spoiled][..., :-1]
    if spoiled is not None or w.num_v_heads % w.num_k_heads:
        try:
            mx.eval(ext.gated_delta_prepare(*inputs, w, None, None))
        except ValueError:
            pass
    elif B:
        check(inputs, w)
    else:
        mx.eval(gated_delta_prepare(*inputs, w))
