"""attention_prepare against float64: dtypes, offsets, partial rotation, the gate, views."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import sequence64 as truth
from sequence_cases import DTYPES, LENGTHS, normal, poisoned, same_gradient

from qwen_metal.ops import attention_prepare as module
from qwen_metal.ops.attention_prepare import Rope, attention_prepare
from qwen_metal.ops.matrix import Norm


def case(B, T, heads, kv_heads, D, dtype, gated=True):
    width = heads * D * (2 if gated else 1)
    return (
        normal(1, B, T, width, dtype=dtype),
        normal(2, B, T, kv_heads * D, dtype=dtype),
        normal(3, B, T, kv_heads * D, dtype=dtype),
        Norm(normal(4, D, dtype=dtype), 1e-6),
        Norm(normal(5, D, dtype=dtype), 1e-6),
    )


def check(inputs, rope, heads, kv_heads, offset=0, gated=True):
    got = attention_prepare(*inputs, rope, heads, kv_heads, offset, gated)
    wanted = truth.attention_prepare(
        *inputs, rope, heads, kv_heads, np.array(offset), gated
    )
    for g, t, x in zip(got, wanted, (*inputs[:3], inputs[0])):
        if t is None:
            assert g is None
            continue
        assert g.dtype == x.dtype
        truth.assert_close(g, t)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", LENGTHS)
def test_lengths(dtype, T, isa):
    check(case(2, T, 4, 2, 64, dtype), Rope.of(nn.RoPE(16, base=1e7)), 4, 2, 3)


@pytest.mark.parametrize("D,dims", [(256, 64), (128, 128), (64, 2), (32, 0), (20, 10)])
@pytest.mark.parametrize("gated", [True, False])
def test_heads(D, dims, gated, isa):
    rope = Rope.of(nn.RoPE(dims, base=1e4, scale=0.5))
    check(case(2, 5, 6, 3, D, mx.float32, gated), rope, 6, 3, 11, gated)


@pytest.mark.parametrize("offset", [[0, 7, 100_000], [-3, 0, 5], 131_071])
def test_offsets(offset):
    inputs = case(3, 4, 2, 1, 64, mx.float32)
    offset = mx.array(offset) if isinstance(offset, list) else offset
    check(inputs, Rope.of(nn.RoPE(32, base=1e6)), 2, 1, offset)


def test_views():
    q, k, v, *norms = case(2, 12, 4, 2, 32, mx.bfloat16)
    rope = Rope.of(nn.RoPE(16, base=1e4))
    check((q[:, ::2], k[:, 1::2], v[:, 6:], *norms), rope, 4, 2)
    wide = mx.concatenate([q, k, v], axis=-1)
    parts = mx.split(wide, [q.shape[2], q.shape[2] + k.shape[2]], axis=-1)
    check((*parts, *norms), rope, 4, 2)
    check((q[..., ::-1], k[..., ::-1], v[..., ::-1], *norms), rope, 4, 2)


def test_values_are_not_copied():
    inputs = case(1, 1, 4, 2, 64, mx.float32)
    mx.eval(inputs[2])
    v = attention_prepare(*inputs, Rope.of(nn.RoPE(16)), 4, 2)[2]
    mx.eval(v)
    places = [np.array(a, copy=False).__array_interface__["data"][0] for a in (inputs[2], v)]
    assert places[0] == places[1]


def test_nothing_written_and_gradient():
    rope = Rope.of(nn.RoPE(8))
    inputs = case(2, 3, 2, 1, 16, mx.float32)
    assert attention_prepare(*case(2, 0, 2, 1, 16, mx.float32), rope, 2, 1)[0].shape == (2, 2, 0, 16)
    poisoned(lambda: attention_prepare(*inputs, rope, 2, 1))
    stock = lambda *a: module.reference(*a, numerics="match")  # noqa: E731

    def loss(function):
        return lambda q, k, v: sum(
            o.sum() for o in function(q, k, v, *inputs[3:], rope, 2, 1, 5)
        )

    same_gradient(loss(attention_prepare), loss(stock), inputs[:3])


def test_wrong_shapes():
    q, k, v, *norms = case(1, 2, 2, 1, 16, mx.float32)
    with pytest.raises(ValueError):
        attention_prepare(q[..., :-1], k, v, *norms, Rope.of(nn.RoPE(8)), 2, 1)
    with pytest.raises(ValueError):
        attention_prepare(q, k, v[:, :1], *norms, Rope.of(nn.RoPE(8)), 2, 1)
    with pytest.raises(ValueError, match="offset"):
        attention_prepare(q, k, v, *norms, Rope.of(nn.RoPE(8)), 2, 1, mx.array([1, 2]))
