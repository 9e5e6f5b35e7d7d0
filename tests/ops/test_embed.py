"""embed against the dequantised table."""

import float64 as truth
import mlx.core as mx
import numpy as np
import pytest

from qwen_metal.ops.embed import embed


@pytest.mark.parametrize("form", truth.QUANTISED + truth.DENSE, ids=str)
def test_formats(form, isa):
    rng = np.random.default_rng(1)
    table = truth.random_matrix(rng, (50, 256), form)
    ids = mx.array(rng.integers(0, 50, (3, 11)))
    truth.check(embed(ids, table), truth.values(table)[np.array(ids)], truth.DECODE)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64, mx.uint8, mx.int16, mx.uint64])
def test_ids(dtype):
    rng = np.random.default_rng(2)
    table = truth.random_matrix(rng, (50, 64), ("affine", 4, 64))
    for ids in (mx.array(3), mx.array([1, 2, 49]), mx.zeros((2, 0)), mx.arange(48).reshape(6, 8)[::2, ::3]):
        ids = ids.astype(dtype)
        got = embed(ids, table)
        assert got.shape == (*ids.shape, 64)
        assert np.array_equal(truth.double(got), truth.double(embed(mx.array(np.array(ids).tolist(), mx.int32), table)))


def test_errors():
    rng = np.random.default_rng(3)
    table = truth.random_matrix(rng, (50, 64), ("affine", 4, 64))
    with pytest.raises(ValueError, match="ids"):
        embed(mx.array([1.0]), table)
    with pytest.raises(RuntimeError, match="outside"):
        mx.eval(embed(mx.array([50]), table))
    assert mx.array_equal(embed(mx.array([-1]), table), embed(mx.array([49]), table))
