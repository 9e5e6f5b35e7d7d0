"""Gradients of fused operations: forward by the kernel, backward by the stock path.

A custom kernel has no gradient of its own, and users call ``mx.grad`` on
models in eval mode too.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mlx.core as mx


def stock_gradient(
    fast: Callable, reference: Callable, arguments: Sequence[Any]
) -> Any:
    """``fast(*arguments)``, differentiable as ``reference(*arguments)``.

    Args:
        fast: the fused route; takes the arguments, returns an array or several.
        reference: plain MLX operations of the same meaning and outputs.
        arguments: arrays, and tuples, named tuples, lists and dicts of them;
            anything else in them (None, a number, a module) is handed on.

    Packed integer weights get a zero gradient, and integer outputs hand none on.
    """
    arrays: list[mx.array] = []
    _mapped(arguments, arrays.append)
    floating = _floating(arrays)

    def rebuild(values):
        following = iter(values)
        return _mapped(arguments, lambda _: next(following))

    @mx.custom_function
    def run(*values):
        return fast(*rebuild(values))

    @run.vjp
    def backward(primals, cotangents, outputs):
        primals, cotangents = _several(primals), _several(cotangents)
        # mx.vjp pairs no cotangent with an output of stop_gradient: an integer output
        # among the others would shift theirs by one.
        kept = _floating(_several(outputs))

        def of_floats(*floats):
            values = list(primals)
            for i, value in zip(floating, floats):
                values[i] = value
            results = _several(reference(*rebuild(values)))
            return [results[i] for i in kept]

        _, gradients = mx.vjp(
            of_floats, [primals[i] for i in floating], [cotangents[i] for i in kept]
        )
        full = [mx.zeros_like(p) for p in primals]
        for i, gradient in zip(floating, gradients):
            full[i] = gradient
        return tuple(full) if len(full) > 1 else full[0]

    outputs = run(*arrays)
    if isinstance(outputs, mx.array):
        return _constant_if_integer(outputs)
    return [_constant_if_integer(o) for o in outputs]


def _floating(arrays: Sequence[mx.array]) -> list[int]:
    """Places of the floating-point arrays."""
    return [i for i, a in enumerate(arrays) if mx.issubdtype(a.dtype, mx.floating)]


def _constant_if_integer(x: mx.array) -> mx.array:
    """Expert numbers are no function to differentiate, and a gather's vjp refuses them."""
    return x if mx.issubdtype(x.dtype, mx.floating) else mx.stop_gradient(x)


def _several(arrays: Any) -> list[mx.array]:
    """A list: of one argument or output mlx hands over the bare array."""
    return [arrays] if isinstance(arrays, mx.array) else list(arrays)


def _mapped(tree: Any, change: Callable) -> Any:
    """The same tree, named tuples included, with ``change`` of each array in its place."""
    if isinstance(tree, mx.array):
        return change(tree)
    if type(tree) is dict:
        return {name: _mapped(value, change) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [_mapped(value, change) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree
