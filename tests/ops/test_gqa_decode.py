"""gqa_decode against float64: dtypes, block boundaries, head counts, quantised caches, padding, views."""

import mlx.core as mx
import numpy as np
import pytest
import sequence64 as truth
from attention_cases import case, check, quantised
from hypothesis import given, settings, strategies as st
from sequence_cases import DTYPES, ext, poisoned, same_gradient

from qwen_metal.ops import gqa_decode as module
from qwen_metal.ops.gqa_decode import gqa_decode

#: Either side of a block (32 positions) and of a part (1,024) of the context.
CONTEXTS = (1, 3, 31, 32, 33, 63, 65, 1023, 1025)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", CONTEXTS)
def test_contexts(dtype, S, isa):
    check(gqa_decode, *case(1, 4, 2, 1, S, 64, dtype))


@pytest.mark.parametrize("D", [16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 1), (10, 2), (6, 2), (5, 5), (14, 2)])
def test_heads(D, heads):
    check(gqa_decode, *case(2, *heads, 1, 70, D, mx.float32))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_quantised(bits, group, dtype, isa):
    q, keys, values, gate = case(2, 8, 2, 1, 77, 128, dtype)
    keys, values, how = quantised(keys, values, bits, group)
    check(gqa_decode, q, keys, values, gate, quantised=how)
    sliced = [tuple(t[:, :, :33] for t in kv) for kv in (keys, values)]
    check(gqa_decode, q, *sliced, gate, quantised=how)


@pytest.mark.parametrize("start", [[0, 5, 77], [76, 77, 100], [-4, 31, 32]])
def test_left_padding(start):
    """A row without any key gives zeros."""
    q, keys, values, gate = case(3, 4, 2, 1, 77, 64, mx.float32)
    check(gqa_decode, q, keys, values, gate, mx.array(start))
    check(gqa_decode, q, keys, values, None, mx.array(start))


def test_a_slice_of_a_longer_buffer_is_read_where_it_stands():
    q, keys, values, gate = case(2, 4, 2, 1, 300, 64, mx.bfloat16)
    check(gqa_decode, q, keys[:, :, :77], values[:, :, :77], gate)
    check(gqa_decode, q, keys[:, :, 13:99], values[:, :, 13:99], gate)
    check(gqa_decode, q, keys[:, :, ::3], values[:, :, 1::3][:, :, :100], gate)
    turned = [t.transpose(0, 2, 1, 3) for t in (keys, values)]  # (B, S, H, D) in memory
    turned = [mx.contiguous(t).transpose(0, 2, 1, 3) for t in turned]
    check(gqa_decode, q, *turned, gate)
    check(gqa_decode, q, *(t.swapaxes(2, 3) for t in (mx.contiguous(t.swapaxes(2, 3)) for t in (keys, values))), gate)
    check(gqa_decode, q, *(mx.broadcast_to(t[:1, :1], t.shape) for t in (keys, values)), gate)
    mx.eval(keys, values)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(gqa_decode(q, keys[:, :, :200], values[:, :, :200], 0.1))
    assert mx.get_peak_memory() - before < keys.nbytes // 4


def test_mixed_types():
    check(gqa_decode, *case(1, 4, 2, 1, 40, 64, mx.float32, mx.bfloat16))
    check(gqa_decode, *case(1, 4, 2, 1, 40, 64, mx.bfloat16, mx.float32))


def test_large_scores_and_equal_scores():
    q, keys, values, gate = case(1, 2, 1, 1, 90, 64, mx.float32)
    check(gqa_decode, q * 100, keys, values, gate)
    check(gqa_decode, q * 0, keys, values, gate)


def test_unread_positions_may_hold_anything():
    q, keys, values, gate = case(1, 2, 1, 1, 64, 64, mx.float32)
    bad = mx.full((1, 1, 64, 64), float("nan"))
    keys, values = (mx.concatenate([bad, t, bad], axis=2) for t in (keys, values))
    got = gqa_decode(q, keys[:, :, :128], values[:, :, :128], 0.125, mx.array([64]), gate=gate)
    assert np.isfinite(np.array(got)).all()
    seen = gqa_decode(q, keys[:, :, 32:128], values[:, :, 32:128], 0.125, gate=gate)
    assert np.isnan(np.array(seen)).all()  # and a NaN that is read is not hidden


def test_no_context_and_no_rows():
    q, keys, values, gate = case(2, 2, 1, 1, 4, 64, mx.float32)
    assert not np.array(gqa_decode(q, keys[:, :, :0], values[:, :, :0], 1.0)).any()
    assert gqa_decode(q[:0], keys[:0], values[:0], 1.0).shape == (0, 1, 128)


def test_written_threads_and_gradient():
    q, keys, values, gate = case(2, 6, 2, 1, 2100, 64, mx.float32)
    poisoned(lambda: gqa_decode(q, keys, values, 0.125, gate=gate))
    results = []
    for threads in (1, 2, 3):
        ext.set_threads(threads)
        results.append(np.array(gqa_decode(q, keys, values, 0.125, gate=gate)))
    ext.set_threads(2)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])

    def loss(function):
        return lambda q, k, v, gate: function(q, k, v, 0.125, gate=gate).sum()

    stock = lambda *a, gate: module.reference(*a, gate=gate, numerics="match")  # noqa: E731
    short = (q, keys[:, :, :9], values[:, :, :9], gate)
    same_gradient(loss(gqa_decode), loss(stock), short)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fuzz(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    heads, kv = draw((1, 1), (4, 1), (6, 3), (5, 2))
    D = draw(16, 24, 64, 128)
    dtype = draw(*DTYPES)
    q, keys, values, gate = case(draw(0, 1, 2), heads, kv, 1, draw(0, 1, 33, 70), D, dtype, draw(*DTYPES))
    how = None
    if draw(True, False) and D % 32 == 0:
        keys, values, how = quantised(keys, values, draw(2, 3, 4, 8), 32)
    start = draw(None, mx.zeros((q.shape[0],), mx.int32), mx.zeros((5,), mx.int32))
    gate = draw(gate, None, gate[..., :-1])
    values = values if how is not None else draw(values, values[:, :, 1:], values.astype(mx.int32))
    good = heads % kv == 0 and D % 16 == 0 and (how is None or how.bits != 3)
    good = good and (start is None or start.shape[0] == q.shape[0])
    good = good and (gate is None or gate.shape[-1] == heads * D)
    if how is None:
        good = good and values.shape == keys.shape and values.dtype != mx.int32
    try:
        got = ext.gqa_decode(q, keys, values, 0.2, start, gate, how)
        mx.eval(got)
    except ValueError:
        assert not good
        return
    assert good
    if how is not None:
        keys, values = (truth.dequantised(t, how.bits, 32) for t in (keys, values))
    truth.assert_close(got, truth.attention(q, keys, values, 0.2, False, start, gate))
