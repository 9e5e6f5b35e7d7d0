"""``route_plan``: expert numbers to rows sorted by expert, never read by the host."""

from __future__ import annotations

from typing import NamedTuple, Optional

import mlx.core as mx
import numpy as np

from .. import routes
from ..kernels import cpu
from ..policy import DEFAULT, Policy

#: Expert number of a padding block.
SENTINEL = 0xFFFFFFFF


class Plan(NamedTuple):
    """Rows sorted by expert. P = R * top_k pairs of a row and an expert.

    order: (P,) uint32, the pair at each sorted place; pair // top_k is its row.
    inverse: (P,) uint32, the sorted place of each pair.
    experts: (P,) uint32, the expert at each sorted place, ascending.
    offsets: (E + 1,) uint32, first sorted place of each expert, then P.
    blocks: (B, 2) uint32, (expert, first sorted place) of each tile of
        ``tile_rows`` rows, padded with (SENTINEL, P); B = ceil(P / tile_rows)
        + min(E, P) is a bound the host knows without reading anything back.
    top_k, tile_rows: int.
    """

    order: mx.array
    inverse: mx.array
    experts: mx.array
    offsets: mx.array
    blocks: mx.array
    top_k: int
    tile_rows: int


def reference(ids: mx.array, num_experts: int, tile_rows: int = 32) -> Plan:
    """The meaning in MLX operations, on the device throughout."""
    top_k, flat = ids.shape[-1], ids.reshape(-1).astype(mx.uint32)
    pairs = flat.size
    order = mx.argsort(flat).astype(mx.uint32)
    inverse = mx.argsort(order).astype(mx.uint32)
    counts = mx.zeros((num_experts,), mx.uint32).at[flat].add(
        mx.ones((pairs,), mx.uint32)
    )
    ends = mx.cumsum(counts).astype(mx.uint32)
    offsets = mx.concatenate([mx.zeros((1,), mx.uint32), ends])
    tiles = (counts + tile_rows - 1) // tile_rows
    last = mx.cumsum(tiles).astype(mx.int32)
    number = mx.arange(block_bound(pairs, num_experts, tile_rows))
    # A block belongs to the first expert whose running tile count exceeds it.
    owner = (number[:, None] >= last[None]).sum(axis=-1)
    real = owner < num_experts
    owner = mx.minimum(owner, num_experts - 1)
    start = offsets[owner].astype(mx.int32) + tile_rows * (
        number - (last[owner] - tiles[owner].astype(mx.int32))
    )
    blocks = mx.stack(
        [
            mx.where(real, owner.astype(mx.uint32), mx.array(SENTINEL, mx.uint32)),
            mx.where(real, start, pairs).astype(mx.uint32),
        ],
        axis=-1,
    )
    return Plan(order, inverse, flat[order], offsets, blocks, top_k, tile_rows)


def block_bound(pairs: int, num_experts: int, tile_rows: int) -> int:
    """Largest number of tiles ``pairs`` can need over ``num_experts``."""
    return -(-pairs // tile_rows) + min(num_experts, pairs)


def supported(ids: mx.array, num_experts: int, policy: Policy = DEFAULT) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("route_plan", policy)


def route_plan(
    ids: mx.array, num_experts: int, tile_rows: int = 32, policy: Policy = DEFAULT
) -> Plan:
    """Sort rows by expert: histogram, offsets, order and block map.

    Args:
        ids: (R, top_k) expert numbers, each below ``num_experts``.
        num_experts: E.
        tile_rows: rows of a tile, 16, 32 or 64.

    Returns:
        A ``Plan``; equal experts keep the order of their rows.

    Raises:
        ValueError: ``ids`` is not an integer matrix, or another tile.

    Source: mlx_lm.models.switch_layers._gather_sort; the block map is ours.
    """
    if ids.ndim != 2 or not mx.issubdtype(ids.dtype, mx.integer):
        raise ValueError(
            f"route_plan: ids is {ids.dtype} {ids.shape}, supported is an integer "
            "matrix (rows, experts a row)"
        )
    if tile_rows not in (16, 32, 64):
        raise ValueError(f"route_plan: tile_rows is {tile_rows}, supported are 16, 32, 64")
    reason = supported(ids, num_experts, policy)
    if reason is None:
        routes.fast("route_plan", "cpu")
        return cpu.route_plan(ids, num_experts, tile_rows)
    routes.stock("route_plan", reason)
    return reference(ids, num_experts, tile_rows)


def plan_on_host(
    ids: mx.array, num_experts: int, tile_rows: int = 32, policy: Policy = DEFAULT
) -> Plan:
    """``route_plan`` by reading the ids back: the control ``routing="host"``.

    Arguments and result are those of ``route_plan``. Waits for the device once.
    """
    routes.fast("route_plan", "host")
    top_k, flat = ids.shape[-1], np.array(ids).reshape(-1)
    order = np.argsort(flat, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(flat.size)
    counts = np.bincount(flat, minlength=num_experts)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    blocks = np.full((block_bound(flat.size, num_experts, tile_rows), 2), flat.size)
    blocks[:, 0] = SENTINEL
    starts = [
        (expert, start)
        for expert in np.flatnonzero(counts)
        for start in range(offsets[expert], offsets[expert + 1], tile_rows)
    ]
    blocks[: len(starts)] = np.array(starts).reshape(-1, 2)
    arrays = (order, inverse, flat[order], offsets, blocks)
    return Plan(*(mx.array(a.astype(np.uint32)) for a in arrays), top_k, tile_rows)
