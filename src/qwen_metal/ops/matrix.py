"""The weights of one linear layer, as its module holds them.

A ``Matrix`` points at the module's own arrays: nothing is copied or packed, so
loading new weights or fusing an adapter is seen at the next call. Bits, group
size and mode are read module by module, because one checkpoint mixes them (the
router and the shared expert's gate of a 4-bit checkpoint are 8-bit).
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..routes import Unsupported

#: (mode, bits) -> group sizes MLX can pack.
FORMATS = {
    **{("affine", bits): (32, 64, 128) for bits in (2, 3, 4, 5, 6, 8)},
    ("mxfp4", 4): (32,),
    ("mxfp8", 8): (32,),
    ("nvfp4", 4): (16,),
}

FLOATS = (mx.bfloat16, mx.float16, mx.float32)


class Norm(NamedTuple):
    """RMSNorm to fold into an operation: weight (K,), float, and epsilon."""

    weight: mx.array
    eps: float


class Matrix(NamedTuple):
    """Weights of a linear layer, (N, K) or (E, N, K) for E experts.

    Quantised (``mode`` of ``affine``, ``mxfp4``, ``mxfp8``, ``nvfp4``):
    ``weight`` uint32 (..., N, K * bits / 32), ``scales`` (..., N, K /
    group_size), ``biases`` of the same shape for affine and None otherwise,
    ``global_scale`` float32 () or (E,) for nvfp4. Float (``mode`` of
    ``float``): ``weight`` (..., N, K), ``bits`` and ``group_size`` 0.
    ``bias`` is the layer's additive output bias (..., N) or None.
    """

    weight: mx.array
    scales: Optional[mx.array] = None
    biases: Optional[mx.array] = None
    bias: Optional[mx.array] = None
    global_scale: Optional[mx.array] = None
    group_size: int = 0
    bits: int = 0
    mode: str = "float"

    @property
    def rows(self) -> int:
        """N, the number of outputs."""
        return self.weight.shape[-2]

    @property
    def columns(self) -> int:
        """K, the number of inputs."""
        if self.mode == "float":
            return self.weight.shape[-1]
        return self.weight.shape[-1] * 32 // self.bits

    @property
    def format(self) -> str:
        """For example ``affine 4-bit group 64`` or ``bfloat16``."""
        if self.mode == "float":
            return str(self.weight.dtype).removeprefix("mlx.core.")
        return f"{self.mode} {self.bits}-bit group {self.group_size}"

    @classmethod
    def of(cls, module: nn.Module) -> "Matrix":
        """The weights of a (quantised) Linear, Embedding or SwitchLinear.

        Raises:
            Unsupported: the module is of another type (an adapter, a sharded
                linear, one that quantises its activations).
        """
        kind = type(module)
        if kind in _QUANTISED:
            return cls(
                module["weight"],
                module["scales"],
                module.get("biases"),
                module.get("bias"),
                getattr(module, "global_scale", None),
                module.group_size,
                module.bits,
                module.mode,
            )
        if kind in _FLOAT:
            return cls(module["weight"], bias=module.get("bias"))
        raise Unsupported(f"a {kind.__name__} layer has no fused kernel")

    def dequantised(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The weights as a float array (..., N, K)."""
        if self.mode == "float":
            return self.weight.astype(dtype)
        scales, biases = self.scales, self.biases
        if self.mode == "affine":
            scales, biases = scales.astype(dtype), biases.astype(dtype)
        return mx.dequantize(
            self.weight,
            scales,
            biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=self.global_scale,
            dtype=dtype,
        )


_FLOAT = (nn.Linear, nn.Embedding, SwitchLinear)
_QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


def check_columns(name: str, x: mx.array, matrix: Matrix) -> None:
    """Raise a ValueError unless the last axis of ``x`` is the matrix's K."""
    if x.shape[-1] != matrix.columns:
        raise ValueError(
            f"{name}: x has {x.shape[-1]} columns, the weight has {matrix.columns}"
        )


def check_float(name: str, argument: str, x: mx.array) -> None:
    """Raise a ValueError unless ``x`` is bfloat16, float16 or float32."""
    if x.dtype not in FLOATS:
        raise ValueError(
            f"{name}: {argument} is {x.dtype}, supported are "
            "bfloat16, float16 and float32"
        )


def matmul(x: mx.array, m: Matrix, numerics: str) -> mx.array:
    """``x @ m.T`` (+ bias) for x (..., K): (..., N), float32 when precise."""
    if numerics == "precise":
        x = x.astype(mx.float32)
    if m.mode == "float":
        weight = m.weight.astype(x.dtype) if numerics == "precise" else m.weight
        if m.bias is not None:
            return mx.addmm(m.bias, x, weight.swapaxes(-1, -2))
        y = x @ weight.swapaxes(-1, -2)
    else:
        y = mx.quantized_matmul(
            x,
            m.weight,
            m.scales,
            m.biases,
            transpose=True,
            group_size=m.group_size,
            bits=m.bits,
            mode=m.mode,
            **({} if m.global_scale is None else {"global_scale": m.global_scale}),
        )
    return y if m.bias is None else y + m.bias


def gather_matmul(
    x: mx.array, m: Matrix, ids: mx.array, numerics: str, sorted_ids: bool = False
) -> mx.array:
    """Each row through its expert, as mlx-lm's SwitchLinear: (..., 1, N).

    ``x`` (..., 1, K) broadcasts against ``ids`` (...), integer expert numbers.
    """
    if numerics == "precise":
        x = x.astype(mx.float32)
    if m.mode == "float":
        weight = m.weight.astype(x.dtype) if numerics == "precise" else m.weight
        y = mx.gather_mm(
            x, weight.swapaxes(-1, -2), rhs_indices=ids, sorted_indices=sorted_ids
        )
    else:
        y = mx.gather_qmm(
            x,
            m.weight,
            m.scales,
            m.biases,
            rhs_indices=ids,
            transpose=True,
            group_size=m.group_size,
            bits=m.bits,
            mode=m.mode,
            global_scale=m.global_scale,
            sorted_indices=sorted_ids,
        )
    return y if m.bias is None else y + mx.expand_dims(m.bias[ids], -2)


def rms_norm(x: mx.array, norm: Optional[Norm], numerics: str) -> mx.array:
    """``x`` normalised over its last axis, or ``x`` itself without a norm."""
    if norm is None:
        return x
    if numerics == "precise":
        return mx.fast.rms_norm(
            x.astype(mx.float32), norm.weight.astype(mx.float32), norm.eps
        )
    return mx.fast.rms_norm(x, norm.weight, norm.eps)
