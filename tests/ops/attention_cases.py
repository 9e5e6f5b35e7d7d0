"""Keys and values for the tests of the two attention ops."""

import mlx.core as mx
import sequence64 as truth
from sequence_cases import normal

from qwen_metal.ops.gqa_decode import QuantisedKV


def case(B, heads, kv_heads, T, S, D, dtype, kv_dtype=None):
    """q, keys, values and gate."""
    kv_dtype = kv_dtype or dtype
    return (
        normal(1, B, heads, T, D, dtype=dtype),
        normal(2, B, kv_heads, S, D, dtype=kv_dtype),
        normal(3, B, kv_heads, S, D, dtype=kv_dtype),
        normal(4, B, T, heads * D, dtype=dtype),
    )


def check(attend, q, keys, values, gate, start=None, causal=False, quantised=None, ratio=1.01):
    """``attend`` (an op, its mask bound) against float64."""
    scale = q.shape[-1] ** -0.5
    got = attend(q, keys, values, scale, start, gate=gate, quantised=quantised)
    if quantised is not None:
        bits, group = quantised.bits, quantised.group_size
        keys, values = (truth.dequantised(t, bits, group) for t in (keys, values))
    wanted = truth.attention(q, keys, values, scale, causal, start, gate)
    assert got.dtype == q.dtype
    truth.assert_close(got, wanted, ratio, relative=1e-6)


def quantised(keys, values, bits, group):
    return (*(mx.quantize(t, group, bits) for t in (keys, values)), QuantisedKV(group, bits))
