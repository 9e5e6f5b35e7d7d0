"""How a result of ours is compared with mlx-lm's: bit for bit, or by relative error.

Never by an elementwise tolerance: a wrong summation passes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

#: Relative RMSE (error / size of what is wanted) of float32 results on another route.
FLOAT32_RRMSE = 1e-5


def numpy(x: mx.array) -> np.ndarray:
    """An array as float64, or as it is where it holds integers or booleans."""
    if mx.issubdtype(x.dtype, mx.floating):
        return np.array(x.astype(mx.float32)).astype(np.float64)
    return np.array(x)


def rrmse(got: Any, want: Any) -> float:
    """Root mean square of the error over that of ``want``; infinite where got is not finite."""
    got, want = (numpy(t) if isinstance(t, mx.array) else np.asarray(t, np.float64) for t in (got, want))
    assert got.shape == want.shape, f"shape {got.shape}, wanted {want.shape}"
    assert np.isfinite(want).all(), "nothing can be compared with a value that is not finite"
    if not np.isfinite(got).all():
        return float("inf")
    error = np.sqrt(np.mean((got - want) ** 2))
    size = np.sqrt(np.mean(want**2))
    return float(error / size) if size else float(error)


@dataclass(frozen=True)
class Route:
    """A policy, and what its results may differ from mlx-lm's by: nothing, where ``exact``."""

    policy: str
    exact: bool

    def agree(self, got: mx.array, want: mx.array, what: str = "") -> None:
        """Assert that ``got`` is ``want``: dtype, shape and values."""
        assert got.dtype == want.dtype, f"{what}: {got.dtype}, wanted {want.dtype}"
        assert got.shape == want.shape, f"{what}: {got.shape}, wanted {want.shape}"
        if self.exact or not mx.issubdtype(want.dtype, mx.floating):
            same = mx.array_equal(got, want).item()
            assert same, f"{what}: not bit-equal" + (
                f", relative RMSE {rrmse(got, want):.2e}" if mx.issubdtype(want.dtype, mx.floating) else ""
            )
        else:
            error = rrmse(got, want)
            assert error <= FLOAT32_RRMSE, f"{what}: relative RMSE {error:.2e}"

    def agree_caches(self, got: list, want: list) -> None:
        """Assert that two prompt caches are equal: classes, fields, dtypes, shapes, values."""
        assert [type(c) for c in got] == [type(c) for c in want]
        for i, (ours, theirs) in enumerate(zip(got, want)):
            ours, theirs = (dict(tree_flatten(vars(c))) for c in (ours, theirs))
            assert list(ours) == list(theirs), f"layer {i}"
            for name, value in theirs.items():
                if isinstance(value, mx.array):
                    self.agree(ours[name], value, f"layer {i} cache field {name}")
                else:
                    assert ours[name] == value, f"layer {i} cache field {name}"


def prompt(length: int, vocabulary: int = 128, seed: int = 1) -> mx.array:
    """Token numbers (1, length), the same for the same arguments."""
    numbers = np.random.default_rng([seed, length]).integers(0, vocabulary, length)
    return mx.array(numbers.astype(np.int32))[None]


def run(model, pieces: list[mx.array], cache: list | None = None) -> tuple[mx.array, list]:
    """Logits of the pieces, one forward each, joined; and the cache after them."""
    cache = make_prompt_cache(model) if cache is None else cache
    logits = []
    for piece in pieces:
        logits.append(model(piece, cache=cache))
        mx.eval(logits[-1], [c.state for c in cache])
    return mx.concatenate(logits, axis=1), cache


def steps(length: int, count: int) -> list[mx.array]:
    """A prompt of ``length`` tokens, then ``count`` single ones."""
    return [prompt(length), *(prompt(1, seed=2 + i) for i in range(count))]


def greedy(model, tokens: mx.array, count: int, **settings) -> list[int]:
    """``count`` greedy tokens after (1, T) or (T,) ``tokens``, by mlx-lm's own loop."""
    return [t for t, _ in generate_step(tokens.reshape(-1), model, max_tokens=count, **settings)]
