"""Instantiations over the headers of the mlx wheel, which all should compile.

The wheel carries kernel headers and no list of what MLX instantiates, so this is a choice: at least one
kernel of every header that holds kernels, with the template arguments that MLX's host code asks for.
"""

from dataclasses import dataclass

from .headers import source

B = "bfloat16_t"
_GEMM = "steel/gemm/gemm.h"
_QUANTIZED = (_GEMM, "quantized_utils.h", "quantized.h")
_FP_QUANTIZED = (_GEMM, "quantized_utils.h", "fp_quantized.h")
_NAX = ("steel/gemm/gemm_nax.h", "quantized_utils.h")
_GEMM_CONSTANTS = {10: False, 100: False, 110: False, 200: False, 201: False, 202: False}
_ATTENTION_CONSTANTS = {200: False, 201: False, 300: True, 301: True, 302: False, 303: False}
_SDPA_CONSTANTS = {20: True, 21: False, 22: True, 23: True, 24: False, 25: False, 26: 64}
_FFT_CONSTANTS = {0: False, 1: True, 2: 4, 3: 4} | {i: 0 for i in range(4, 25)}


@dataclass(frozen=True)
class Instantiation:
    """One kernel to compile; constants are function constants by index."""

    headers: tuple
    name: str
    template_args: tuple
    constants: dict
    version: int

    @property
    def source(self):
        """Metal text that includes what the kernel needs."""
        return source(*self.headers)

    @property
    def label(self):
        """Kernel and template arguments, as in an error message."""
        return f"{self.name}<{', '.join(map(str, self.template_args))}> of {self.headers[-1]}"


def _entry(headers, name, *template_args, constants=None, version=310):
    headers = (headers,) if isinstance(headers, str) else headers
    return Instantiation(headers, name, template_args, constants or {}, version)


# Clang's OpenCL mode does not take a function with private pointers as a template argument.
KNOWN_FAILURES = {"fft": "function pointers as template arguments (radix_n_steps)"}

ALL = [
    _entry("arange.h", "arange", "float"),
    _entry(("binary_ops.h", "binary.h"), "binary_vv", B, B, "Multiply"),
    _entry(("binary_ops.h", "binary.h"), "binary_g", "float", "float", "Add", 4, "int"),
    _entry(("binary_ops.h", "binary_two.h"), "binary_vv", "float", "float", "DivMod"),
    _entry("copy.h", "copy_v", B, "float"),
    _entry("copy.h", "copy_gg", "half", "half", 4, "int"),
    _entry("cross_entropy.h", "cross_entropy", B),
    _entry("dot.h", "dot_product", "float", 4, 256, 8),
    _entry("fft.h", "fft", 256, "float2", "float2", constants=_FFT_CONSTANTS),
    _entry(_FP_QUANTIZED, "fp_qmv_fast", B, 32, 4, False),
    _entry(_FP_QUANTIZED, "fp_gather_qmv_fast", B, 32, 4),
    _entry(_FP_QUANTIZED, "fp_qmm_t", B, 16, 4, False, False),
    _entry(_FP_QUANTIZED, "fp_gather_qmm_rhs", B, 32, 8, 16, 32, 32, 1, 2, True),
    _entry((*_NAX, "fp_quantized_nax.h"), "fp_gather_qmm_rhs_nax", B, 32, 4, 64, 64, 64, 2, 2, True,
           constants=_GEMM_CONSTANTS, version=400),
    _entry("gated_delta_update.h", "gated_delta_seq", B, 128, 128, 16, 32, 64, constants={200: False}),
    _entry("gated_delta_update.h", "gated_delta_fused_chunk", B, 128, 128, 16, 32, 8),
    _entry("gated_delta_update_vjp.h", "gated_delta_vjp_seq", B, 128, 128, 2, 4, 64),
    _entry(("steel/gemm/nax.h", "gated_delta_update_nax.h"), "gated_delta_fused_nax", B, 128, 128, 16, 32, 16, 4,
           constants={200: False}, version=400),
    _entry(("steel/gemm/nax.h", "gated_delta_update_nax_vjp.h"), "gated_delta_dgamma_to_dg", B, 16, version=400),
    _entry("gemv.h", "gemv_wide", B, 4, 8),
    _entry("hadamard.h", "hadamard_n", "float", 64, 16, 4),
    _entry("indexing/gather_axis.h", "gather_axis", B, "uint32_t", "int", True, True),
    _entry("indexing/gather_front.h", "gather_front", B, "uint32_t", "int", 4),
    _entry("indexing/masked_scatter.h", "masked_assign_impl", B, True),
    _entry(("atomic.h", "reduction/ops.h", "indexing/scatter_axis.h"), "scatter_axis", "float", "uint32_t", "int",
           "Sum<float>", True, True),
    _entry("logsumexp.h", "logsumexp", B),
    _entry("logsumexp.h", "logsumexp_looped", "float"),
    _entry(_QUANTIZED, "affine_qmv_fast", B, 64, 4, False),
    _entry(_QUANTIZED, "affine_qmv", B, 64, 3, False),
    _entry(_QUANTIZED, "affine_qmv_quad", B, 64, 8, 128, False),
    _entry(_QUANTIZED, "affine_qmv_wide", B, 64, 4, 4, 8, False),
    _entry(_QUANTIZED, "affine_qvm", B, 64, 4, False),
    _entry(_QUANTIZED, "affine_qmm_t", B, 64, 4, True, False),
    _entry(_QUANTIZED, "affine_qmm_n", B, 64, 6, False),
    _entry(_QUANTIZED, "affine_gather_qmv_fast", "half", 32, 5),
    _entry(_QUANTIZED, "affine_gather_qmm_t", B, 64, 4, True),
    _entry(_QUANTIZED, "affine_gather_qmm_rhs", B, 64, 4, 16, 32, 32, 1, 2, True),
    _entry(_QUANTIZED, "affine_quantize", B, 64, 4),
    _entry(_QUANTIZED, "affine_dequantize", B, 64, 4),
    _entry((*_NAX, "quantized_nax.h"), "affine_qmm_t_nax", B, 64, 4, True, False, version=400,
           constants=_GEMM_CONSTANTS),
    _entry((*_NAX, "quantized_nax.h"), "affine_gather_qmm_rhs_nax", B, 64, 4, 64, 64, 64, 2, 2, True, version=400,
           constants=_GEMM_CONSTANTS),
    _entry(("atomic.h", "reduction/ops.h", "reduce_utils.h", "reduce.h"), "all_reduce", B, B, f"Sum<{B}>"),
    _entry(("atomic.h", "reduction/ops.h", "reduce_utils.h", "reduce.h"), "row_reduce_simple", "float", "float",
           "Max<float>"),
    _entry(("atomic.h", "reduction/ops.h", "reduce_utils.h", "reduce.h"), "col_reduce_looped", "float", "float",
           "Sum<float>", "int", 1, 32, 32),
    _entry(("binary_ops.h", "scan.h"), "contiguous_scan", "float", "float", "CumSum<float>", 4, True, False),
    _entry("sdpa_blocked.h", "sdpa_blocked_scale_copy", B),
    _entry("sdpa_vector.h", "sdpa_vector", B, 256, 256, constants=_SDPA_CONSTANTS),
    _entry("sdpa_vector.h", "sdpa_vector_2pass_1", B, 256, 256, constants=_SDPA_CONSTANTS),
    _entry("sdpa_vector.h", "sdpa_vector_2pass_1_gqa", B, 256, 256, 8, 2, constants=_SDPA_CONSTANTS),
    _entry("sdpa_vector.h", "sdpa_vector_2pass_2", B, 256, constants=_SDPA_CONSTANTS),
    _entry(("sort.h", "searchsorted.h"), "searchsorted", "float", True),
    _entry("softmax.h", "softmax_single_row", B, "float"),
    _entry("softmax.h", "softmax_looped", B, "float"),
    _entry("sort.h", "block_sort", "float", "uint32_t", True, 128, 8),
    _entry(("steel/attn/attn.h", "steel/attn/kernels/steel_attention.h"), "attention", B, 32, 16, 128, 128, 4, 1,
           "bool", constants=_ATTENTION_CONSTANTS),
    _entry(("steel/attn/nax.h", "steel/attn/kernels/steel_attention_nax.h"), "attention_nax", B, 64, 32, 128, 128, 4,
           1, "bool", constants=_ATTENTION_CONSTANTS, version=400),
    _entry((_GEMM, "steel/conv/conv.h", "steel/conv/params.h", "steel/conv/kernels/steel_conv.h"),
           "implicit_gemm_conv_2d", B, 32, 32, 16, 2, 2),
    _entry((_GEMM, "steel/gemm/kernels/steel_gemm_fused.h"), "gemm", B, 64, 64, 16, 2, 2, False, True,
           constants=_GEMM_CONSTANTS),
    _entry(("steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_fused_nax.h"), "gemm", B, 64, 64, 64, 2, 2, False,
           True, constants=_GEMM_CONSTANTS, version=400),
    _entry((_GEMM, "steel/gemm/kernels/steel_gemm_gather.h"), "gather_mm_rhs", B, 16, 64, 16, 1, 2, False, False,
           constants=_GEMM_CONSTANTS),
    _entry((_GEMM, "steel/gemm/kernels/steel_gemm_segmented.h"), "segmented_mm", B, 64, 64, 16, 2, 2, False, False,
           constants=_GEMM_CONSTANTS | {199: False}),
    _entry((_GEMM, "steel/gemm/kernels/steel_gemm_splitk.h"), "gemm_splitk", B, "float", 32, 32, 16, 2, 2, False,
           True, True, True),
    _entry(("steel/gemm/nax.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_thin_nax.h"), "gemm_thin_nax",
           B, 1, 2, 1, 2, 2, True, constants=_GEMM_CONSTANTS, version=400),
    _entry(("ternary_ops.h", "ternary.h"), "ternary_v", B, "Select", False, False),
    _entry(("unary_ops.h", "unary.h"), "unary_v", B, B, "Exp"),
    _entry(("unary_ops.h", "unary.h"), "unary_v", "float", "float", "Sigmoid"),
    _entry(("unary_ops.h", "unary.h"), "unary_v", "complex64_t", "complex64_t", "Cos"),
]  # fmt: skip
