"""What the operations compute, in numpy float64 from the dequantised weights; and how far off an answer is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from qwen_metal.ops.matrix import FORMATS, Matrix

#: Every format, as ``(mode, bits, group_size)``; floats by their dtype.
QUANTISED = [(mode, bits, group) for (mode, bits), groups in FORMATS.items() for group in groups]
DENSE = ["bfloat16", "float16", "float32"]

#: Largest error over that of rounding the exact answer, in decode and in prefill; and for float32 outputs.
DECODE, PREFILL, FLOAT32 = 1.01, 1.05, 1e-6


def double(a: mx.array) -> np.ndarray:
    """An array as numpy float64 (bfloat16 has no numpy dtype of its own)."""
    if mx.issubdtype(a.dtype, mx.floating):
        a = a.astype(mx.float32)
    return np.array(a).astype(np.float64)


def values(m: Matrix) -> np.ndarray:
    """The weights (..., N, K): scale * code + bias of the stored numbers, exactly."""
    if m.mode == "float":
        return double(m.weight)
    if m.mode != "affine":
        # Powers of two times small numbers: float32 holds them exactly, save for the global scale.
        w = mx.dequantize(
            m.weight, m.scales, None, m.group_size, m.bits, m.mode, dtype=mx.float32
        )
        scale = 1.0 if m.global_scale is None else double(m.global_scale)
        return double(w) * np.reshape(scale, np.shape(scale) + (1, 1) * (np.ndim(scale) > 0))
    codes = unpack(m)
    scales = np.repeat(double(m.scales), m.group_size, axis=-1)
    return codes * scales + np.repeat(double(m.biases), m.group_size, axis=-1)


def unpack(m: Matrix) -> np.ndarray:
    """The integer codes (..., N, K): a little-endian bit stream a row."""
    data = np.ascontiguousarray(np.array(m.weight)).view(np.uint8)
    bits = np.unpackbits(data, axis=-1, bitorder="little")
    bits = bits.reshape(*bits.shape[:-1], -1, m.bits).astype(np.int64)
    return bits @ (1 << np.arange(m.bits))


def matmul(x: np.ndarray, m: Matrix) -> np.ndarray:
    """``x @ m.T`` (+ bias)."""
    y = x @ np.swapaxes(values(m), -1, -2)
    return y if m.bias is None else y + double(m.bias)


def rms_norm(x: np.ndarray, weight: mx.array, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * double(weight)


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1.0 + np.exp(-x))


def relative(answer: mx.array, exact: np.ndarray) -> float:
    """RMSE of ``answer`` over the root mean square of ``exact``."""
    if exact.size == 0:
        return 0.0
    error = np.sqrt(np.mean((double(answer) - exact) ** 2))
    return float(error / max(np.sqrt(np.mean(exact**2)), 1e-300))


def error_ratio(answer: mx.array, exact: np.ndarray) -> float:
    """RMSE of ``answer`` over that of ``exact`` rounded to the dtype of ``answer``: 1 loses nothing."""
    floor = relative(mx.array(exact.astype(np.float32)).astype(answer.dtype), exact)
    return relative(answer, exact) / floor if floor else relative(answer, exact)


def check(answer: mx.array, exact: np.ndarray, allowed: float) -> None:
    """Assert the error target of the dtype of ``answer``."""
    assert answer.shape == exact.shape, (answer.shape, exact.shape)
    if answer.dtype == mx.float32:
        assert relative(answer, exact) <= FLOAT32, relative(answer, exact)
    else:
        assert error_ratio(answer, exact) <= allowed, error_ratio(answer, exact)


def near(answer: mx.array, exact: np.ndarray, columns: int) -> None:
    """Assert each number, for a few of them at random, of which one may be the rest of a cancellation.

    ``columns`` products of normal rows and weights as ``random_matrix`` makes them have the size
    0.02 * sqrt(columns) by themselves.
    """
    unit = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 6e-3}[answer.dtype]
    assert answer.shape == exact.shape, (answer.shape, exact.shape)
    assert np.allclose(double(answer), exact, rtol=unit, atol=unit * 0.02 * np.sqrt(columns))


def random_matrix(rng, shape, form, dtype=mx.bfloat16, bias=False, scale=0.02) -> Matrix:
    """A matrix of normal weights; ``form`` is an entry of QUANTISED or DENSE."""
    w = mx.array(rng.normal(0.0, scale, shape).astype(np.float32)).astype(dtype)
    out = mx.array(rng.normal(0.0, scale, shape[:-1]).astype(np.float32)).astype(dtype) if bias else None
    if isinstance(form, str):
        return Matrix(w.astype(getattr(mx, form)), bias=out)
    mode, bits, group = form
    weight, scales, *biases = mx.quantize(w, group, bits, mode)
    return Matrix(
        weight, scales, biases[0] if biases else None, out, None, group, bits, mode
    )


def random_rows(rng, shape, dtype, positive=False) -> mx.array:
    x = rng.normal(0.0, 1.0, shape).astype(np.float32)
    return mx.array(np.abs(x) if positive else x).astype(dtype)
