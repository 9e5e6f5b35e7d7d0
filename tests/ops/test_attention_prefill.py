"""attention_prefill against float64: dtypes, odd lengths, offsets, quantised caches, padding, views."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
import sequence64 as truth
from attention_cases import case, check, quantised
from hypothesis import given, settings, strategies as st
from sequence_cases import DTYPES, LENGTHS, ext, poisoned, same_gradient

from qwen_metal.ops import attention_prefill as module
from qwen_metal.ops.attention_prefill import attention_prefill

causal = partial(check, attention_prefill, causal=True, ratio=1.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", LENGTHS)
def test_lengths(dtype, T, isa):
    causal(*case(1, 4, 2, T, T, 64, dtype))


@pytest.mark.parametrize("T,S", [(1, 64), (2, 65), (12, 128), (13, 127), (33, 129), (65, 200)])
def test_offsets(T, S, isa):
    causal(*case(2, 8, 1, T, S, 128, mx.float32))


@pytest.mark.parametrize("D", [16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (10, 2), (6, 2), (5, 5), (130, 1)])
def test_heads(D, heads):
    causal(*case(1, *heads, 17, 40, D, mx.float32))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_quantised(bits, group, isa):
    q, keys, values, gate = case(2, 4, 2, 9, 77, 128, mx.bfloat16)
    keys, values, how = quantised(keys, values, bits, group)
    causal(q, keys, values, gate, quantised=how)
    sliced = [tuple(t[:, :, :33] for t in kv) for kv in (keys, values)]
    causal(q, *sliced, gate, quantised=how)


@pytest.mark.parametrize("start", [[0, 5, 77], [63, 64, 65], [76, 77, 100], [-4, 31, 32]])
@pytest.mark.parametrize("T", [5, 77])
def test_left_padding(start, T):
    """A row of padding has no key; it gives zeros."""
    q, keys, values, gate = case(3, 4, 2, T, 77, 64, mx.float32)
    causal(q, keys, values, gate, mx.array(start))


@pytest.mark.parametrize("S", [3, 40, 130])
def test_every_key(S):
    q, keys, values, gate = case(1, 4, 2, 7, S, 64, mx.float32)
    check(partial(attention_prefill, mask=None), q, keys, values, gate)


def test_views():
    q, keys, values, gate = case(2, 4, 2, 20, 300, 64, mx.bfloat16)
    causal(q[:, :, ::2], keys[:, :, :77], values[:, :, :77], gate[:, ::2])
    causal(q, keys[:, :, ::3], values[:, :, ::3], None)
    rows = mx.contiguous(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    causal(rows, keys, values, gate)
    causal(q[..., ::-1], keys, values, gate)


def test_large_scores():
    q, keys, values, gate = case(1, 2, 1, 9, 90, 64, mx.float32)
    causal(q * 30, keys, values, gate)


def test_nothing():
    q, keys, values, gate = case(2, 2, 1, 4, 4, 64, mx.float32)
    assert attention_prefill(q[:, :, :0], keys, values, 1.0).shape == (2, 0, 128)
    assert attention_prefill(q[:0], keys[:0], values[:0], 1.0).shape == (0, 4, 128)
    empty = attention_prefill(q, keys[:, :, :0], values[:, :, :0], 1.0, mask=None)
    assert not np.array(empty).any()


def test_written_threads_and_gradient():
    q, keys, values, gate = case(2, 6, 2, 40, 100, 64, mx.float32)
    poisoned(lambda: attention_prefill(q, keys, values, 0.125, gate=gate))
    results = []
    for threads in (1, 2, 3):
        ext.set_threads(threads)
        results.append(np.array(attention_prefill(q, keys, values, 0.125, gate=gate)))
    ext.set_threads(2)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])

    def stock(q, k, v, scale, gate):
        return module.reference(q, k, v, scale, "causal", gate, numerics="match")

    def loss(function):
        return lambda q, k, v, gate: function(q, k, v, 0.125, gate=gate).sum()

    same_gradient(loss(attention_prefill), loss(stock), (q, keys, values, gate))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fuzz(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    heads, kv = draw((1, 1), (4, 1), (6, 3), (5, 2))
    D, T, S = draw(16, 24, 64), draw(0, 1, 9, 30), draw(0, 1, 33, 70)
    q, keys, values, gate = case(draw(0, 1, 2), heads, kv, T, S, D, draw(*DTYPES), draw(*DTYPES))
    start = draw(None, mx.zeros((q.shape[0],), mx.int32), mx.zeros((5,), mx.int32))
    gate = draw(gate, None, gate[..., :-1])
    causal = draw(True, False)
    good = heads % kv == 0 and D % 16 == 0 and (S >= T or not causal)
    good = good and (start is None or start.shape[0] == q.shape[0])
    good = good and (gate is None or gate.shape[-1] == heads * D)
    try:
        got = ext.attention_prefill(q, keys, values, 0.2, start, causal, gate, None)
        mx.eval(got)
    except ValueError:
        assert not good
        return
    assert good
    truth.assert_close(got, truth.attention(q, keys, values, 0.2, causal, start, gate), 1.05)
