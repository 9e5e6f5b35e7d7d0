"""``projections``: RMSNorm and several matrices on one set of rows, in one launch."""

from __future__ import annotations

from typing import Optional, Sequence

import mlx.core as mx

from ..kernels import cpu
from ..policy import DEFAULT, Policy
from ..routes import count_fast, count_stock
from .matrix import Matrix, Norm, check_columns, check_float, matmul, rms_norm


def reference(
    x: mx.array,
    matrices: Sequence[Matrix],
    norm: Optional[Norm] = None,
    residual: Optional[mx.array] = None,
    dtype: Optional[mx.Dtype] = None,
    numerics: str = "precise",
) -> list[mx.array]:
    """The meaning in MLX operations; ``match`` is what mlx-lm computes."""
    out = dtype or x.dtype
    h = rms_norm(x, norm, numerics)
    ys = [matmul(h, m, numerics) for m in matrices]
    if residual is not None:
        ys = [residual + y for y in ys]
    return ys if numerics == "match" else [y.astype(out) for y in ys]


def supported(
    x: mx.array,
    matrices: Sequence[Matrix],
    norm: Optional[Norm] = None,
    residual: Optional[mx.array] = None,
    dtype: Optional[mx.Dtype] = None,
    policy: Policy = DEFAULT,
) -> Optional[str]:
    """None, or why no fast route serves this call."""
    return cpu.missing("projections", policy)


def projections(
    x: mx.array,
    matrices: Sequence[Matrix],
    norm: Optional[Norm] = None,
    residual: Optional[mx.array] = None,
    dtype: Optional[mx.Dtype] = None,
    policy: Policy = DEFAULT,
) -> list[mx.array]:
    """``[rms_norm(x) @ m.T + residual for m in matrices]``.

    Args:
        x: rows (..., K), float.
        matrices: each (N_i, K), of any format, each with its own.
        norm: RMSNorm folded in, weight (K,); None takes the rows as they are.
        residual: (..., N) added to the output; only with a single matrix.
        dtype: of the outputs; default that of ``x``. The router asks for
            float32, so that close logits do not tie. The stock path keeps
            mlx-lm's own output dtype.

    Returns:
        One array (..., N_i) a matrix.

    Raises:
        ValueError: shapes that do not fit, x not float, no matrix, or a
            residual with several matrices.

    Source: mlx.nn.RMSNorm, mlx.nn.QuantizedLinear.
    """
    check_float("projections", "x", x)
    if not matrices or (residual is not None and len(matrices) > 1):
        raise ValueError(
            f"projections: got {len(matrices)} matrices"
            + (" and a residual, supported is one with a residual" if matrices else "")
        )
    for m in matrices:
        check_columns("projections", x, m)
    reason = supported(x, matrices, norm, residual, dtype, policy)
    if reason is None:
        count_fast("projections", "cpu")
        return cpu.projections(x, matrices, norm, residual, dtype)
    count_stock("projections", reason)
    return reference(x, matrices, norm, residual, dtype, numerics="match")
