"""``embed``: rows of a (quantised) embedding table, in one launch."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx

from ..kernels import cpu
from ..policy import DEFAULT, Policy
from ..routes import count_fast, count_stock
from .matrix import Matrix


def reference(ids: mx.array, table: Matrix) -> mx.array:
    """What mlx-lm computes: gather the packed rows, then dequantise them."""
    if table.mode == "float":
        return table.weight[ids]
    return mx.dequantize(
        table.weight[ids],
        scales=table.scales[ids],
        biases=None if table.biases is None else table.biases[ids],
        group_size=table.group_size,
        bits=table.bits,
        mode=table.mode,
    )


def supported(ids: mx.array, table: Matrix, policy: Policy = DEFAULT) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("embed", policy)


def embed(ids: mx.array, table: Matrix, policy: Policy = DEFAULT) -> mx.array:
    """The embedding rows of ``ids``.

    Args:
        ids: integer token numbers, any shape.
        table: embedding weights (V, D).

    Returns:
        (*ids.shape, D) in the table's activation dtype (that of its scales for
        affine formats, bfloat16 for the floating-point formats).

    Raises:
        ValueError: ``ids`` is not of an integer dtype.
        RuntimeError: at evaluation, an id outside the table (a negative one
            counts from its end).

    Source: mlx.nn.QuantizedEmbedding.
    """
    if not mx.issubdtype(ids.dtype, mx.integer):
        raise ValueError(f"embed: ids is {ids.dtype}, supported are integer dtypes")
    reason = supported(ids, table, policy)
    if reason is None:
        count_fast("embed", "cpu")
        return cpu.embed(ids, table)
    count_stock("embed", reason)
    return reference(ids, table)
