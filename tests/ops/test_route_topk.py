"""route_topk against float64, and its order."""

import float64 as truth
import mlx.core as mx
import numpy as np
import pytest
from sequence_cases import DTYPES, poisoned

from qwen_metal.ops import route_topk as module
from qwen_metal.ops.route_topk import route_topk


def exact(logits, ids, normalise):
    x = truth.double(logits)
    gates = np.exp(x - x.max(axis=-1, keepdims=True))
    chosen = np.take_along_axis(gates, np.array(ids).astype(np.int64), axis=-1)
    return chosen / (chosen if normalise else gates).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("shape", [(1, 256), (0, 16), (3, 7, 33), (65, 128), (1, 1), (1000, 8)])
@pytest.mark.parametrize("normalise", (True, False))
def test_shapes(shape, normalise):
    rng = np.random.default_rng(1)
    for dtype in DTYPES:
        logits = truth.random_rows(rng, shape, dtype)
        for top_k in {1, min(8, shape[-1]), shape[-1]}:
            ids, scores = route_topk(logits, top_k, normalise)
            assert ids.dtype == mx.uint32 and scores.dtype == mx.float32
            assert ids.shape == scores.shape == (*shape[:-1], top_k)
            wanted, _ = module.reference(logits, top_k, normalise)
            assert mx.array_equal(ids, wanted)
            truth.check(scores, exact(logits, ids, normalise), truth.DECODE)


def test_equal_logits():
    """Of equal logits the highest index wins."""
    ids, scores = route_topk(mx.zeros((2, 9)), 4)
    assert ids.tolist() == [[8, 7, 6, 5]] * 2 and mx.allclose(scores, mx.array(0.25))


def test_nan_and_infinite_logits():
    """Ids stay valid and distinct, so that what follows reads only experts there are."""
    nan, inf = float("nan"), float("inf")
    rows = [
        [nan, 1.0, 2.0, 0.0], [nan] * 4, [inf, 1.0, 2.0, 0.0],
        [-inf, 1.0, 2.0, 0.0], [-inf] * 4, [inf, inf, nan, -inf],
    ]  # fmt: skip
    logits = mx.array(rows)
    for top_k in (1, 2, 4):
        ids, scores = route_topk(logits, top_k)
        wanted, _ = module.reference(logits, top_k)
        assert mx.array_equal(ids, wanted)
        assert all(len(set(row)) == top_k and max(row) < 4 for row in ids.tolist())
    assert ids.tolist()[0] == [2, 1, 3, 0]
    assert np.isnan(np.array(scores[1])).all() and not np.isnan(np.array(scores[3])).any()


def test_views_and_rubbish():
    rng = np.random.default_rng(2)
    logits = truth.random_rows(rng, (6, 64), mx.float32)
    for view in (logits[::2, 1::3], logits.T, mx.broadcast_to(logits[:1], (4, 64))):
        ids, scores = route_topk(view, 5)
        truth.check(scores, exact(view, ids, True), truth.DECODE)
    poisoned(lambda: route_topk(logits, 3))


def test_errors_and_gradient():
    logits = mx.array([[1.0, 3.0, 2.0, -1.0]])
    for top_k in (0, 5):
        with pytest.raises(ValueError, match="top_k"):
            route_topk(logits, top_k)
    with pytest.raises(ValueError):
        route_topk(logits.astype(mx.int32), 2)
    weights = mx.array([0.3, -0.7])
    got, wanted = (
        mx.grad(lambda x: (f(x, 2)[1] * weights).sum())(logits) for f in (route_topk, module.reference)
    )
    assert mx.allclose(got, wanted)
