"""route_plan against its reference, number by number."""

import mlx.core as mx
import numpy as np
import pytest
from sequence_cases import poisoned

from qwen_metal.ops import route_plan as module
from qwen_metal.ops.route_plan import route_plan


def same(ids, experts, tile_rows=32):
    got, wanted = route_plan(ids, experts, tile_rows), module.reference(ids, experts, tile_rows)
    for name in ("order", "inverse", "experts", "offsets", "blocks"):
        a, b = getattr(got, name), getattr(wanted, name)
        assert a.dtype == b.dtype == mx.uint32 and mx.array_equal(a, b), name
    assert (got.top_k, got.tile_rows) == (wanted.top_k, wanted.tile_rows)


@pytest.mark.parametrize("rows", (1, 7, 31, 33, 63, 65, 1000))
@pytest.mark.parametrize("tile_rows", (16, 32, 64))
def test_rows(rows, tile_rows):
    rng = np.random.default_rng(rows)
    for experts, top_k in ((256, 8), (5, 1), (1, 1), (16, 3)):
        ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)])
        same(mx.array(ids), experts, tile_rows)


def test_uneven():
    """No token to most experts; every token to one; the same expert twice; none at all."""
    same(mx.full((65, 2), 7, mx.uint32), 256)
    same(mx.array([[0, 255]]), 256)
    same(mx.array(np.arange(256).reshape(1, 256)), 256)
    plan = route_plan(mx.zeros((0, 8), mx.uint32), 4)
    assert plan.order.shape == (0,) and plan.offsets.tolist() == [0] * 5 and plan.blocks.shape == (0, 2)


def test_views_and_rubbish():
    ids = mx.array(np.random.default_rng(1).integers(0, 9, (12, 6)))
    same(ids[::2, ::3], 9)
    same(ids.T, 9)
    poisoned(lambda: list(route_plan(ids, 9)[:5]))


def test_errors():
    with pytest.raises(ValueError):
        route_plan(mx.zeros((2, 2)), 4)
    with pytest.raises(ValueError):
        route_plan(mx.zeros((2,), mx.int32), 4)
    with pytest.raises(ValueError):
        route_plan(mx.zeros((2, 2), mx.int32), 4, 48)
    for bad in (4, -1):
        with pytest.raises(RuntimeError, match="outside"):
            mx.eval(route_plan(mx.array([[0, bad]]), 4))
