"""gated_norm against float64."""

import mlx.core as mx
import pytest
import sequence64 as truth
from sequence_cases import DTYPES, normal, poisoned, same_gradient

from qwen_metal.ops import gated_norm as module
from qwen_metal.ops.gated_norm import gated_norm
from qwen_metal.ops.matrix import Norm


def check(y, z, norm, dtype=None):
    got = gated_norm(y, z, norm, dtype)
    assert got.dtype == (dtype or y.dtype)
    truth.assert_close(got, truth.gated_norm(y, z, norm.weight, norm.eps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 4, 128), (2, 33, 3, 128), (5, 36), (7,), (1, 65, 2, 20)])
def test_shapes(dtype, shape, isa):
    norm = Norm(normal(3, shape[-1], dtype=dtype), 1e-6)
    check(normal(1, *shape, dtype=dtype), normal(2, *shape, dtype=dtype, scale=3), norm)
    check(normal(1, *shape), normal(2, *shape, dtype=dtype, scale=3), norm, dtype)


def test_extreme_gates_and_small_rows():
    z = mx.array([[-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, 1.0]])
    check(normal(1, 1, 8, scale=1e-3), z, Norm(normal(2, 8), 1e-6))


def test_views_and_nothing():
    norm = Norm(normal(3, 16), 1e-6)
    y, z = normal(1, 4, 6, 16), normal(2, 6, 4, 16)
    check(y[::2, ::-1], z.swapaxes(0, 1)[1::2], norm)
    assert gated_norm(y[:0], y[:0], norm).shape == (0, 6, 16)


def test_wrong_shapes():
    with pytest.raises(ValueError, match="equal shapes"):
        gated_norm(normal(1, 2, 16), normal(1, 2, 17), Norm(normal(3, 16), 1e-6))
    with pytest.raises(ValueError, match="weight"):
        gated_norm(normal(1, 2, 16), normal(1, 2, 16), Norm(normal(3, 15), 1e-6))


def test_written_and_gradient():
    y, z, weight = normal(1, 2, 5, 20), normal(2, 2, 5, 20), normal(3, 20)
    poisoned(lambda: gated_norm(y, z, Norm(weight, 1e-6)))
    stock = lambda *a: module.reference(*a, numerics="match")  # noqa: E731
    same_gradient(
        lambda y, z, w: gated_norm(y, z, Norm(w, 1e-6)).sum(),
        lambda y, z, w: stock(y, z, Norm(w, 1e-6)).sum(),
        (y, z, weight),
    )
