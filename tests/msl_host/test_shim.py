"""Metal's library on the host: every function against numpy or the specification."""

import math

import numpy as np
import pytest

from msl_host import Kernel, Uninitialised

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
LANES = np.arange(32)


def run(expressions, x, dtype="float", out_dtype=None, threads=None, before=""):
    """Evaluate each expression of `v` (element i of x) and `lane` in every thread, checked; rows of results."""
    out_dtype = out_dtype or dtype
    rows = "\n".join(f"  out[{k} * n + i] = {e};" for k, e in enumerate(expressions))
    source = HEAD + (
        f"[[kernel]] void k(const device {dtype}* x [[buffer(0)]], device {out_dtype}* out [[buffer(1)]],"
        " const constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]],"
        " uint lane [[thread_index_in_simdgroup]]) {\n"
        f"  {dtype} v = x[i];\n{before}\n{rows}\n}}\n"
    )
    kinds = {"float": np.float32, "half": np.float16, "int": np.int32, "uint": np.uint32, "ulong": np.uint64,
             "ushort": np.uint16, "uchar": np.uint8, "short": np.int16}  # fmt: skip
    x = np.asarray(x, kinds[dtype])
    kernel = Kernel(source, "k", checked=True)
    result = kernel.run(dict(x=x, out=Uninitialised((len(expressions), x.size), kinds[out_dtype]), n=np.uint32(x.size)),
                        x.size, threads or 32)  # fmt: skip
    assert not result.report, "\n".join(map(str, result.report))
    return result["out"]


UNARY = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: 10.0**x, "log": np.log, "log2": np.log2, "log10": np.log10,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "atan": np.arctan, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "floor": np.floor,
    "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "round": lambda x: np.floor(x + 0.5), "fabs": np.abs,
    "fract": lambda x: x - np.floor(x), "sinpi": lambda x: np.sin(np.pi * x), "abs": np.abs, "sign": np.sign,
    "saturate": lambda x: np.clip(x, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("space", ["metal", "fast", "precise"])
def test_unary_mathematics(space):
    x = np.random.default_rng(0).uniform(0.1, 4, 64).astype(np.float32)
    names = [n for n in UNARY if space == "metal" or n not in {"sign", "saturate", "abs"}]
    prefix = "metal::" if space == "metal" else f"metal::{space}::"
    for name, row in zip(names, run([f"{prefix}{n}(v)" for n in names], x)):
        assert np.allclose(row, UNARY[name](x.astype(np.float64)), rtol=2e-6, atol=2e-6), name


def test_binary_mathematics_and_comparisons():
    x = np.random.default_rng(0).uniform(-4, 4, 64).astype(np.float32)
    wide = x.astype(np.float64)
    cases = {
        "max(v, 0.5f)": np.maximum(x, 0.5), "min(v, 0.5f)": np.minimum(x, 0.5),
        "clamp(v, -1.0f, 1.0f)": np.clip(x, -1, 1),
        "fma(v, v, v)": wide * wide + wide, "pow(fabs(v), 1.5f)": np.abs(wide) ** 1.5,
        "atan2(v, 2.0f)": np.arctan2(wide, 2),
        "fmod(v, 1.5f)": np.fmod(wide, 1.5), "copysign(2.0f, v)": np.copysign(2, x),
        "mix(v, 1.0f, 0.25f)": wide * 0.75 + 0.25,
        "step(0.0f, v)": (x >= 0) * 1.0, "select(v, 9.0f, v > 1.0f)": np.where(x > 1, 9, x), "ldexp(v, 3)": x * 8,
        "isnan(v / 0.0f * 0.0f) ? 1.0f : 0.0f": np.ones(64), "max3(v, 0.0f, 1.0f)": np.maximum(x, 1),
        "float(signbit(v))": (x < 0) * 1.0, "fdim(v, 1.0f)": np.maximum(x - 1, 0),
        "numeric_limits<float>::max()": np.full(64, 3.4028235e38),
    }  # fmt: skip
    for (name, expected), row in zip(cases.items(), run(list(cases), x)):
        assert np.allclose(row, expected, rtol=2e-6, atol=2e-6), name


def test_frexp_of_every_size():
    x = np.array([1, 0.5, 3, -7.25, 1e-40, 3e38, 0, -1e-45] * 4, np.float32)
    mantissa, exponent = run(["m", "float(e)"], x, before="int e; float m = frexp(v, e);")
    expected = [math.frexp(float(v)) for v in x]
    assert np.array_equal(mantissa, [m for m, _ in expected]) and np.array_equal(exponent, [e for _, e in expected])


def test_integers():
    x = np.array([0, 1, 2, 3, 0x80000000, 0xFFFFFFFF, 0x12345678, 96] * 4, np.uint32)
    values = [int(v) for v in x]
    cases = {
        "popcount(v)": [bin(v).count("1") for v in values],
        "clz(v)": [32 - v.bit_length() for v in values],
        "ctz(v)": [(v & -v).bit_length() - 1 if v else 32 for v in values],
        "reverse_bits(v)": [int(f"{v:032b}"[::-1], 2) for v in values],
        "mulhi(v, 0x87654321u)": [v * 0x87654321 >> 32 for v in values],
        "rotate(v, 5u)": [(v << 5 | v >> 27) & 0xFFFFFFFF for v in values],
        "extract_bits(v, 4u, 8u)": [v >> 4 & 255 for v in values],
        "uint(max(int(v), 1))": [max(v - (v >> 31 << 32), 1) for v in values],
        "as_type<uint>(as_type<float>(v))": values,
        "uint(abs(int(v)))": [abs(v - (v >> 31 << 32)) for v in values],
    }
    for (name, expected), row in zip(cases.items(), run(list(cases), x, "uint")):
        assert row.tolist() == expected, name


def test_simd_functions_move_what_they_should():
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    lanes = x.reshape(2, 32)
    ballot = "float(uint(ulong(simd_ballot(v > 0.0f))) & 0xffffu)"
    cases = {
        "simd_shuffle(v, 31 - lane)": lanes[:, ::-1], "simd_broadcast(v, 7)": lanes[:, [7] * 32],
        "simd_broadcast_first(v)": lanes[:, [0] * 32], "simd_shuffle_xor(v, 5)": lanes[:, LANES ^ 5],
        "simd_shuffle_up(v, 3)": np.hstack([lanes[:, :3], lanes[:, :-3]]),
        "simd_shuffle_down(v, 3)": np.hstack([lanes[:, 3:], lanes[:, -3:]]),
        "simd_shuffle_rotate_up(v, 3)": np.roll(lanes, 3, 1), "simd_shuffle_rotate_down(v, 3)": np.roll(lanes, -3, 1),
        "simd_shuffle_and_fill_up(v, 9.0f, 2)": np.hstack([np.full((2, 2), 9), lanes[:, :-2]]),
        "simd_shuffle_and_fill_down(v, 9.0f, 2)": np.hstack([lanes[:, 2:], np.full((2, 2), 9)]),
        "quad_shuffle_xor(v, 1)": lanes[:, LANES ^ 1], "quad_broadcast(v, 2)": lanes[:, LANES // 4 * 4 + 2],
        "simd_max(v)": lanes.max(1, keepdims=True), "simd_min(v)": lanes.min(1, keepdims=True),
        "quad_max(v)": lanes.reshape(2, 8, 4).max(2).repeat(4, 1),
        "simd_any(v > 1.0f) ? 1.0f : 0.0f": (lanes > 1).any(1, keepdims=True),
        "simd_all(v > -9.0f) ? 1.0f : 0.0f": np.ones((2, 1)), "simd_is_first() ? 1.0f : 0.0f": LANES == 0,
        ballot: ((lanes[:, :16] > 0) * 2.0 ** np.arange(16)).sum(1, keepdims=True),
    }  # fmt: skip
    for (name, expected), row in zip(cases.items(), run(list(cases), x, threads=64)):
        assert np.array_equal(row.reshape(2, 32), np.broadcast_to(expected, (2, 32)).astype(np.float32)), name


def _butterfly(values):
    """Sums in the order of partners 1, 2, 4, 8, 16 lanes away, in the type of the values."""
    values = values.copy()
    for step in (1, 2, 4, 8, 16):
        values[:: 2 * step] += values[step :: 2 * step]
    return values[0]


@pytest.mark.parametrize(("kind", "dtype"), [("float", np.float32), ("half", np.float16)])
def test_simd_sum_adds_in_butterfly_order(kind, dtype):
    x = np.random.default_rng(0).standard_normal(64).astype(dtype)
    (sums,) = run(["simd_sum(v)"], x, kind)
    assert np.array_equal(sums.reshape(2, 32)[:, 0], [_butterfly(part) for part in x.reshape(2, 32)])


def test_simd_reductions_of_integers_and_prefixes():
    x = np.random.default_rng(0).integers(1, 2**31, 32).astype(np.uint32)
    cases = {
        "simd_sum(v)": x.sum(dtype=np.uint32), "simd_and(v)": np.bitwise_and.reduce(x),
        "simd_or(v)": np.bitwise_or.reduce(x),
        "simd_xor(v)": np.bitwise_xor.reduce(x), "simd_product(v)": np.multiply.reduce(x),
        "uint(simd_min(ushort(v)))": (x & 0xFFFF).min(), "simd_prefix_inclusive_sum(v)": np.cumsum(x, dtype=np.uint32),
        "simd_prefix_exclusive_sum(v)": np.cumsum(x, dtype=np.uint32) - x,
        "simd_sum(uint2(v, 1u)).y": 32,
        "uint(simd_sum(ulong(v)) >> 32)": x.sum(dtype=np.uint64) >> np.uint64(32),
    }  # fmt: skip
    for (name, expected), row in zip(cases.items(), run(list(cases), x, "uint")):
        assert np.array_equal(row, np.broadcast_to(expected, 32).astype(np.uint32)), name


def test_inactive_lanes_are_left_out():
    (row,) = run(["lane < 20 ? simd_sum(v) : 0.0f"], np.ones(32))
    assert row.tolist() == [20.0] * 20 + [0.0] * 12


def test_ragged_simdgroup():
    (row,) = run(["simd_sum(v)"], np.ones(40), threads=40)
    assert row.tolist() == [32.0] * 32 + [8.0] * 8


def test_vectors():
    cases = {
        "float4(v, 1, 2, 3).wzyx.x": 3, "float4(v, 1, 2, 3).yz.y": 2, "float3(float2(v, 4), 5).z": 5,
        "dot(float3(1, 2, 3), float3(v, v, v))": 6, "float4(v).a": 1, "(float2(1, 2) * 3.0f + float2(v)).y": 7,
        "float(all(float2(1, 2) < float2(2, 3)))": 1, "swizzled.x * 10 + swizzled.y": 21,
        "float(uchar4(1, 2, 3, 250)[3])": 250,
        "max(float2(1, 5), float2(v, 2)).y": 5, "float(as_type<uchar4>(0x04030201u).z)": 3, "float(sizeof(float3))": 16,
        "float(sizeof(packed_float3))": 12, "float(int4(float4(1.9f, 2, 3, 4)).x)": 1, "length(float2(3, 4))": 5,
    }  # fmt: skip
    before = "float2 swizzled = float2(1, 2); swizzled.xy = swizzled.yx;"
    for (name, expected), row in zip(cases.items(), run(list(cases), np.ones(32), before=before)):
        assert np.all(row == expected), name


MATRIX = HEAD + """
  [[kernel]] void k(const device float* a [[buffer(0)]], const device float* b [[buffer(1)]],
                    device float* c [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
    simdgroup_float8x8 ma, mb, mc = make_filled_simdgroup_matrix<float, 8>(1.0f);
    simdgroup_load(ma, a, 24, ulong2(8, 8));
    simdgroup_load(mb, b, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(mc, ma, mb, mc);
    simdgroup_store(mc, c, 8);
  }"""


def test_simdgroup_matrices():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 24)).astype(np.float32), rng.standard_normal((8, 8)).astype(np.float32)
    result = Kernel(MATRIX, "k", checked=True).run(dict(a=a, b=b, c=Uninitialised((8, 8), np.float32)), 32, 32)
    assert not result.report
    assert np.allclose(result["c"], 1 + a[8:, 8:16].astype(np.float64) @ b.T, rtol=1e-6, atol=1e-6)


TENSORS = HEAD + """
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
[[kernel]] void k(device half* a [[buffer(0)]], device half* b [[buffer(1)]], device float* c [[buffer(2)]],
                  const constant int3& size [[buffer(3)]]) {
  using shape = metal::dextents<int32_t, 2>;
  using strides = metal::array<int32_t, 2>;
  metal::tensor<device half, shape, metal::tensor_inline> ta(a, shape(size.z, size.x), strides{1, size.z});
  metal::tensor<device half, shape, metal::tensor_inline> tb(b, shape(size.y, size.z), strides{1, size.y});
  metal::tensor<device float, shape, metal::tensor_inline> tc(c, shape(size.y, size.x), strides{1, size.y});
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 32, false, false, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> op;
  auto out = op.get_destination_cooperative_tensor<decltype(ta), decltype(tb), float>();
  op.run(ta, tb, out);
  out.store(tc);
}"""


@pytest.mark.parametrize("sizes", [(16, 32, 32), (13, 27, 32), (1, 5, 7)])
def test_tensor_products_are_masked_at_the_edges(sizes):
    rows, columns, depth = sizes
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((rows, depth), (depth, columns)))
    size = np.array([rows, columns, depth, 0], np.int32)
    kernel = Kernel(TENSORS, "k", checked=True, metal_version=400)
    result = kernel.run(dict(a=a, b=b, c=Uninitialised((rows, columns), np.float32), size=size), 32, 32)
    assert not result.report
    assert np.allclose(result["c"], a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)
