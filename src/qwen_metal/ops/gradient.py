"""Gradients of fused operations: forward by the kernel, backward by the stock path.

A custom kernel has no gradient of its own, and users call ``mx.grad`` on
models in eval mode too.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten


def stock_gradient(
    fast: Callable, reference: Callable, arguments: Sequence[Any]
) -> Any:
    """``fast(*arguments)``, differentiable as ``reference(*arguments)``.

    Args:
        fast: the fused route; takes the arguments, returns a list of arrays.
        reference: plain MLX operations of the same meaning and outputs.
        arguments: trees of arrays (None and numbers may stand in them).

    Packed integer weights get a zero gradient, as they have none.
    """
    leaves = tree_flatten(list(arguments))
    where = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, mx.array)]
    arrays = [leaves[i][1] for i in where]
    floating = [i for i, a in enumerate(arrays) if mx.issubdtype(a.dtype, mx.floating)]

    def rebuild(values):
        filled = list(leaves)
        for i, value in zip(where, values):
            filled[i] = (filled[i][0], value)
        return tree_unflatten(filled)

    @mx.custom_function
    def run(*values):
        return fast(*rebuild(values))

    @run.vjp
    def backward(primals, cotangents, outputs):
        if isinstance(cotangents, mx.array):  # of a function with one output
            cotangents = [cotangents]

        def of_floats(*floats):
            values = list(primals)
            for i, value in zip(floating, floats):
                values[i] = value
            return _differentiable(reference(*rebuild(values)))

        # Integer outputs have no gradient, and mx.vjp skips some of them by itself.
        _, gradients = mx.vjp(
            of_floats, [primals[i] for i in floating], _differentiable(cotangents, outputs)
        )
        full = [mx.zeros_like(p) for p in primals]
        for i, gradient in zip(floating, gradients):
            full[i] = gradient
        return tuple(full)

    return run(*arrays)


def _differentiable(values: Any, like: Any = None) -> list[mx.array]:
    """The arrays of ``values`` whose counterpart in ``like`` (default: itself) is float."""
    values, like = ([v] if isinstance(v, mx.array) else v for v in (values, values if like is None else like))
    return [v for v, other in zip(values, like) if mx.issubdtype(other.dtype, mx.floating)]
