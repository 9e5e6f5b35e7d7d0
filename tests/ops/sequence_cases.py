"""Inputs and checks that the tests of the ops along a sequence share."""

import mlx.core as mx
import numpy as np

from qwen_metal import extension
from qwen_metal.ops.gated_delta_prepare import DeltaWeights

ext = extension.load()

DTYPES = (mx.bfloat16, mx.float16, mx.float32)

#: Odd numbers of tokens, either side of the blocks of the kernels.
LENGTHS = (1, 7, 31, 33, 63, 65)


def normal(seed, *shape, dtype=mx.float32, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return mx.array(values.astype(np.float32)).astype(dtype)


def uniform(seed, low, high, *shape):
    values = np.random.default_rng(seed).uniform(low, high, shape)
    return mx.array(values.astype(np.float32))


def delta_weights(Hk, Hv, Dk, Dv, dtype, taps=4, seed=100):
    C = 2 * Hk * Dk + Hv * Dv
    return DeltaWeights(
        normal(seed, C, taps, 1, dtype=dtype),
        normal(seed + 1, Hv),
        normal(seed + 2, Hv, dtype=dtype),
        normal(seed + 3, Dv, dtype=dtype),
        Hk,
        Hv,
        Dk,
        Dv,
        1e-6,
    )


def poisoned(call):
    """Two calls with different rubbish in the allocator's buffers give the same bits."""
    results = []
    for rubbish in (float("nan"), 1e30):
        shapes = [o.shape for o in _flat(call())]
        mx.eval([mx.full(shape, rubbish) for shape in shapes for _ in range(3)])
        outputs = _flat(call())
        mx.eval(outputs)
        results.append([np.array(o.astype(mx.float32)) for o in outputs])
    for a, b in zip(*results):
        assert np.array_equal(a, b)


def _flat(outputs):
    outputs = [outputs] if isinstance(outputs, mx.array) else outputs
    return [o for o in outputs if o is not None]


def same_gradient(fast, stock, arguments):
    """Gradients of the fused route and of mlx-lm's operations, bit for bit."""
    where = list(range(len(arguments)))
    got = mx.grad(fast, where)(*arguments)
    wanted = mx.grad(stock, where)(*arguments)
    for g, w in zip(got, wanted):
        assert np.array_equal(np.array(g.astype(mx.float32)), np.array(w.astype(mx.float32)))
