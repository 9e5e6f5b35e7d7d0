"""The upstream reproduction of the lost activation sum (MLX issue 4631): 8 experts, dense and gathered.

Its input distribution is not published, so the pattern over M and the ratio of
gathered to dense are what to compare, not the digits.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import mlx.core as mx

from ..ops.grouped_qmm import grouped_qmm
from ..ops.matrix import Matrix, gather_matmul, matmul
from ..ops.projections import projections
from ..ops.route_plan import route_plan
from ..routes import separate
from .common import float64, rms, rounded, route_of
from .grid import SEED, one_expert

EXPERTS, OUTPUTS, INPUTS = 8, 512, 2048
ROWS = (1, 2, 4, 8, 16)


def run(engines: Sequence[str], name: str) -> Iterator[dict[str, Any]]:
    """One row an engine and M: q_rmse (dense), g_rmse (gathered) and the floor of each."""
    mx.random.seed(SEED)
    weight = mx.random.normal((EXPERTS, OUTPUTS, INPUTS)).astype(mx.bfloat16) * 0.02
    packed = mx.quantize(weight, group_size=64, bits=4)
    experts = Matrix(*packed, group_size=64, bits=4, mode="affine")
    exact = float64(experts.dequantised())
    for rows in ROWS:
        x = mx.random.normal((rows, INPUTS)).astype(mx.bfloat16)
        ids = mx.sort(mx.random.randint(0, EXPERTS, (rows,)).astype(mx.uint32))
        dense = float64(x) @ exact[0].T
        gathered = (exact[ids.tolist()] @ float64(x)[..., None])[..., 0]
        for engine in engines:
            with separate() as counts:
                q, g = _outputs(engine, x, experts, ids)
                routes = counts()
            yield {
                "rows": rows,
                "engine": engine,
                "backend": name,
                "q_rmse": float(rms(float64(q.astype(x.dtype)) - dense)),
                "g_rmse": float(rms(float64(g.astype(x.dtype)) - gathered)),
                "q_floor": float(rms(rounded(dense, x.dtype) - dense)),
                "g_floor": float(rms(rounded(gathered, x.dtype) - gathered)),
                "route": route_of(routes, "grouped_qmm") if engine == "qwen_metal" else "mlx",
            }


def _outputs(engine: str, x: mx.array, experts: Matrix, ids: mx.array) -> tuple[mx.array, mx.array]:
    """Every row through expert 0, and each row through its own."""
    if engine == "mlx":
        gathered = gather_matmul(x[:, None], experts, ids, "match", True)[:, 0]
        return matmul(x, one_expert(experts, 0), "match"), gathered
    plan = route_plan(ids[:, None], EXPERTS)
    return projections(x, [one_expert(experts, 0)])[0], grouped_qmm(x, (experts,), plan)
