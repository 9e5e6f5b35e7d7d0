"""Launches MLX's kernels as its host code does: same arguments, grids and function constants.

Arrays of bfloat are uint16 bits. Every function takes `include`, the folder of the headers, and
`how`: arguments for Kernel (checked) and for run (seed, lockstep). It returns (outputs, Result).
"""

from functools import lru_cache

import numpy as np

from ..run import Kernel, Uninitialised
from .headers import source

BFLOAT = "bfloat16_t"
QUANTIZED = source("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
_BUILD_OPTIONS = ("checked", "compiler")


@lru_cache(maxsize=256)
def _kernel(text, name, template_args, constants, include, version, options):
    return Kernel(text, name, template_args, dict(constants), includes=(include,), metal_version=version,
                  **dict(options))  # fmt: skip


def kernel(text, name, template_args, include, constants=None, version=310, **how):
    """A kernel of MLX's headers, built once in a process."""
    options = tuple((k, how[k]) for k in _BUILD_OPTIONS if k in how)
    constants = tuple((constants or {}).items())
    return _kernel(text, name, tuple(template_args), constants, str(include), version, options)


def _run_options(how):
    return {k: v for k, v in how.items() if k not in _BUILD_OPTIONS}


def _ints(*values):
    return np.array(values, np.int32)


def _longs(*values):
    return np.array(values, np.int64)


def _by_groups(groups, threadgroup):
    """dispatchThreadgroups: the grid in threads."""
    return tuple(g * t for g, t in zip(groups, threadgroup))


def ceil_div(a, b):
    return -(-a // b)


# ---- quantised ----


def gather_qmv(include, weights, scales, biases, x, indices, bits, group=64, **how):
    """Row r of x (R, 1, K) times expert indices[r] of weights (E, N, K * bits / 32): y (R, N), bfloat bits."""
    rows, _, depth = x.shape
    experts, outputs, words = weights.shape
    groups = scales.shape[2]
    is_fast = outputs % 8 == 0 and depth % 512 == 0
    name = "affine_gather_qmv_fast" if is_fast else "affine_gather_qmv"
    args = dict(
        w=weights, scales=scales, biases=biases, x=x, y=Uninitialised((rows, 1, outputs), np.uint16),
        lhs_indices=np.arange(rows, dtype=np.uint32), rhs_indices=np.asarray(indices, np.uint32),
        in_vec_size=np.int32(depth), out_vec_size=np.int32(outputs), x_batch_ndims=np.int32(1),
        x_shape=_ints(rows, 1, depth), x_strides=_longs(depth, depth, 1), w_batch_ndims=np.int32(1),
        w_shape=_ints(experts, outputs, words), w_strides=_longs(outputs * words, words, 1),
        s_strides=_longs(outputs * groups, groups, 1), b_strides=_longs(outputs * groups, groups, 1),
        batch_ndims=np.int32(1), batch_shape=_ints(rows), lhs_strides=_longs(1), rhs_strides=_longs(1),
    )  # fmt: skip
    result = kernel(QUANTIZED, name, (BFLOAT, group, bits), include, **how).run(
        args, (32, ceil_div(outputs, 8) * 2, rows), (32, 2, 1), **_run_options(how)
    )
    return result["y"][:, 0], result


def _unbatched(depth, outputs, x_shape):
    return dict(
        x_batch_ndims=np.int32(0), x_shape=_ints(*x_shape), x_strides=_longs(x_shape[-1], 1), w_batch_ndims=np.int32(0),
        w_shape=_ints(outputs, 1), w_strides=_longs(1, 1), s_strides=_longs(1, 1), b_strides=_longs(1, 1),
    )  # fmt: skip


def qmv(include, weights, scales, biases, x, bits, group=64, **how):
    """x (M, K) times weights (N, K * bits / 32), a row at a time: y (M, N), bfloat bits."""
    (rows, depth), outputs = x.shape, weights.shape[0]
    is_fast = outputs % 8 == 0 and depth % 512 == 0
    args = dict(
        w=weights, scales=scales, biases=biases, x=x, y=Uninitialised((rows, outputs), np.uint16),
        in_vec_size=np.int32(depth), out_vec_size=np.int32(outputs), **_unbatched(depth, outputs, x.shape),
    )  # fmt: skip
    name = "affine_qmv_fast" if is_fast else "affine_qmv"
    result = kernel(QUANTIZED, name, (BFLOAT, group, bits, False), include, **how).run(
        args, (rows * 32, ceil_div(outputs, 8) * 2, 1), (32, 2, 1), **_run_options(how)
    )
    return result["y"], result


def qmv_wide(include, weights, scales, biases, x, bits, group=64, vectors=4, lanes=8, **how):
    """qmv for a few rows: `vectors` of them in a threadgroup, `lanes` along K."""
    (rows, depth), outputs = x.shape, weights.shape[0]
    args = dict(
        w=weights, scales=scales, biases=biases, x=x, y=Uninitialised((rows, outputs), np.uint16),
        in_vec_size=np.int32(depth), out_vec_size=np.int32(outputs), M=np.int32(rows),
        **_unbatched(depth, outputs, x.shape),
    )  # fmt: skip
    made = kernel(QUANTIZED, "affine_qmv_wide", (BFLOAT, group, bits, vectors, lanes, False), include, **how)
    groups = (ceil_div(rows, vectors), ceil_div(outputs, 2 * (32 // lanes)), 1)
    result = made.run(args, _by_groups(groups, (32, 2, 1)), (32, 2, 1), **_run_options(how))
    return result["y"], result


def qmm_t(include, weights, scales, biases, x, bits, group=64, **how):
    """x (M, K) times weights (N, K * bits / 32) transposed, on SIMD-group matrices: y (M, N), bfloat bits."""
    (rows, depth), outputs = x.shape, weights.shape[0]
    args = dict(
        w=weights, scales=scales, biases=biases, x=x, y=Uninitialised((rows, outputs), np.uint16), K=np.int32(depth),
        N=np.int32(outputs), M=np.int32(rows), **_unbatched(depth, outputs, x.shape),
    )  # fmt: skip
    result = kernel(QUANTIZED, "affine_qmm_t", (BFLOAT, group, bits, outputs % 32 == 0, False), include, **how).run(
        args, _by_groups((ceil_div(outputs, 32), ceil_div(rows, 32), 1), (32, 2, 2)), (32, 2, 2), **_run_options(how)
    )
    return result["y"], result


# ---- attention of one query ----

_SDPA = source("sdpa_vector.h")
_NO_MASK = {20: False, 21: False, 22: False, 23: False, 24: False, 25: False}


def _sdpa_arguments(queries, keys, values, scale):
    length, dim = keys.shape[1:]
    strides = dict(k_head_stride=length * dim, k_seq_stride=dim, v_head_stride=length * dim, v_seq_stride=dim)
    return dict(
        queries=queries, keys=keys, values=values, N=np.int32(length), scale=np.float32(scale),
        **{name: np.uint64(stride) for name, stride in strides.items()},
    )  # fmt: skip


def sdpa_vector(include, queries, keys, values, scale, mask=None, **how):
    """queries (Hq, 1, D), keys and values (Hkv, N, D); mask: None or bool (Hq, 1, N)."""
    heads, _, dim = queries.shape
    length = keys.shape[1]
    args = _sdpa_arguments(queries, keys, values, scale)
    args |= dict(out=Uninitialised(queries.shape, np.uint16), gqa_factor=np.int32(heads // keys.shape[0]))
    constants = dict(_NO_MASK)
    if mask is not None:
        constants |= {20: True, 23: True}
        args |= dict(bmask=mask, mask_kv_seq_stride=np.int32(1), mask_q_seq_stride=np.int32(length),
                     mask_head_stride=np.int32(length))  # fmt: skip
    result = kernel(_SDPA, "sdpa_vector", (BFLOAT, dim, dim), include, constants, **how).run(
        args, (heads * 1024, 1, 1), (1024, 1, 1), **_run_options(how)
    )
    return result["out"], result


def sdpa_two_pass(include, queries, keys, values, scale, blocks=64, **how):
    """The same through partial results of `blocks` blocks; returns both launches."""
    heads, _, dim = queries.shape
    group = heads // keys.shape[0]
    args = _sdpa_arguments(queries, keys, values, scale)
    args |= dict(out=Uninitialised((heads, 1, blocks, dim), np.uint16), sums=Uninitialised((heads, blocks), np.float32),
                 maxs=Uninitialised((heads, blocks), np.float32))  # fmt: skip
    first = kernel(_SDPA, "sdpa_vector_2pass_1", (BFLOAT, dim, dim), include, _NO_MASK | {26: blocks}, **how).run(
        args, _by_groups((keys.shape[0], 1, blocks), (32, group, 1)), (32, group, 1), **_run_options(how)
    )
    args = dict(partials=first["out"], sums=first["sums"], maxs=first["maxs"], blocks=np.int32(blocks),
                out=Uninitialised(queries.shape, np.uint16))  # fmt: skip
    second = kernel(_SDPA, "sdpa_vector_2pass_2", (BFLOAT, dim), include, **how).run(
        args, (heads * 1024, 1, 1), (1024, 1, 1), **_run_options(how)
    )
    return second["out"], (first, second)


# ---- dense GEMM ----

_GEMM_PARAMS = np.dtype([("sizes", np.int32, 8), ("batch_strides", np.int64, 3), ("more", np.int32, 3)], align=True)


def _gemm_params(rows, columns, depth, lda, ldb, tiles, k_iterations):
    params = np.zeros(1, _GEMM_PARAMS)
    params["sizes"] = (rows, columns, depth, lda, ldb, columns, tiles[1], tiles[0])
    params["more"] = (0, k_iterations, 0)
    return params.view(np.uint8)


def _aligned(sizes, blocks):
    return {200 + i: size % block == 0 for i, (size, block) in enumerate(zip(sizes, blocks))}


_NO_EPILOGUE = {10: False, 100: False, 110: False}


def steel_gemm(include, a, b, transpose_a=False, transpose_b=True, matrix_units=False, dtype=BFLOAT, **how):
    """a times b (both stored row-major, possibly transposed), bfloat bits or half; D (M, N)."""
    rows, depth = a.shape[::-1] if transpose_a else a.shape
    columns = b.shape[0] if transpose_b else b.shape[1]
    blocks = (64, 64, 64) if matrix_units else (64, 64, 16)
    tiles = (ceil_div(rows, blocks[0]), ceil_div(columns, blocks[1]))
    if matrix_units:
        text = source("steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_fused_nax.h")
    else:
        text = source("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h")
    params = _gemm_params(rows, columns, depth, a.shape[1], b.shape[1], tiles, depth // blocks[2])
    constants = _NO_EPILOGUE | _aligned((rows, columns, depth), blocks)
    made = kernel(text, "gemm", (dtype, *blocks, 2, 2, transpose_a, transpose_b), include, constants,
                  400 if matrix_units else 310, **how)  # fmt: skip
    result = made.run(dict(A=a, B=b, D=Uninitialised((rows, columns), a.dtype), params=params),
                      _by_groups((tiles[1], tiles[0], 1), (32, 2, 2)), (32, 2, 2), **_run_options(how))  # fmt: skip
    return result["D"], result


def thin_gemm(include, a, b, units=(1, 2), simds=(1, 2), k_groups=2, **how):
    """MLX's GEMM on metal::tensor slices: a (M, K) times b (N, K) transposed, bfloat bits."""
    (rows, depth), columns = a.shape, b.shape[0]
    tile = (16 * units[0] * simds[0], 16 * units[1] * simds[1])
    tiles = (ceil_div(rows, tile[0]), ceil_div(columns, tile[1]))
    # Blocks of one SIMD-group decide what counts as aligned.
    blocks = (16 * units[0], 16 * units[1], 64)
    params = _gemm_params(rows, columns, depth, a.shape[1], b.shape[1], tiles, ceil_div(depth, 64 * k_groups))
    text = source("steel/gemm/nax.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_thin_nax.h")
    threads = 32 * simds[0] * simds[1] * k_groups
    made = kernel(text, "gemm_thin_nax", (BFLOAT, *units, *simds, k_groups, True), include,
                  _NO_EPILOGUE | _aligned((rows, columns, depth), blocks), 400, **how)  # fmt: skip
    result = made.run(dict(A=a, B=b, D=Uninitialised((rows, columns), np.uint16), params=params),
                      _by_groups((tiles[0] * tiles[1], 1, 1), (threads, 1, 1)), (threads, 1, 1),
                      **_run_options(how))  # fmt: skip
    return result["D"], result


# ---- attention of many queries ----

_ATTENTION_PARAMS = np.dtype(
    [("sizes", np.int32, 6), ("scale", np.float32), ("blocks", np.int32, 7), ("strides", np.int64, 12)], align=True
)


def steel_attention(include, queries, keys, values, causal=False, matrix_units=False, **how):
    """queries (Hq, L, D), keys and values (Hkv, S, D), scaled by D ** -0.5; out (Hq, L, D), bfloat bits."""
    heads, length, dim = queries.shape
    kv_heads, kv_length, _ = keys.shape
    block_q, block_k = (64, 32) if matrix_units else (32, 16 if dim == 128 else 32)
    blocks = ceil_div(length, block_q), ceil_div(kv_length, block_k)
    params = np.zeros(1, _ATTENTION_PARAMS)
    params["sizes"] = (1, heads, dim, length, kv_length, heads // kv_heads)
    params["scale"] = dim**-0.5
    params["blocks"] = (*blocks, length // block_q, kv_length // block_k, length % block_q, kv_length % block_k,
                        kv_length - length)  # fmt: skip
    params["strides"] = [
        stride for n, h in ((length, heads), *[(kv_length, kv_heads)] * 2, (length, heads))
        for stride in (h * n * dim, n * dim, dim)
    ]  # fmt: skip
    name, header = ("attention_nax", "nax.h") if matrix_units else ("attention", "attn.h")
    text = source(f"steel/attn/{header}", f"steel/attn/kernels/steel_{name}.h")
    constants = {200: length % block_q == 0, 201: kv_length % block_k == 0, 300: False, 301: causal, 302: False,
                 303: False}  # fmt: skip
    made = kernel(text, name, (BFLOAT, block_q, block_k, dim, dim, 4, 1, "bool"), include, constants,
                  400 if matrix_units else 310, **how)  # fmt: skip
    args = dict(Q=queries, K=keys, V=values, O=Uninitialised(queries.shape, np.uint16), params=params.view(np.uint8))
    result = made.run(args, _by_groups((blocks[0], heads, 1), (32, 4, 1)), (32, 4, 1), **_run_options(how))
    return result["O"], result


# ---- gated delta rule of MLX itself ----


def gated_delta(include, form, q, k, v, g, beta, state, **how):
    """One of MLX's own gated-delta kernels: form "seq", "fused_chunk" or "fused_nax".

    q, k (B, T, Hk, Dk), v (B, T, Hv, Dv), g, beta (B, T, Hv) are bfloat bits, state (B, Hv, Dv, Dk) is
    float32. Returns ((y, state), Result).
    """
    batch, steps, k_heads, k_dim = k.shape
    v_heads, v_dim = v.shape[2:]
    args = dict(
        q=q, k=k, v=v, g=g, beta=beta, state_in=state, T=np.int32(steps), y=Uninitialised(v.shape, np.uint16),
        state_out=Uninitialised(state.shape, np.float32),
    )  # fmt: skip
    sizes = (BFLOAT, k_dim, v_dim, k_heads, v_heads)
    text, version, constants, lines = source("gated_delta_update.h"), 310, {200: False}, v_dim
    if form == "seq":
        template = (*sizes, 64)
    elif form == "fused_chunk":
        template, constants, lines = (*sizes, 8), {}, v_dim // 8
    else:
        chunk = 16
        template, version, lines = (*sizes, chunk, 4), 400, v_dim // 16
        text = source("steel/gemm/nax.h", "gated_delta_update_nax.h")
        chunks = ceil_div(steps, chunk)
        args |= dict(
            state_cache=np.zeros((batch, v_heads, chunks, v_dim, k_dim), np.float32),
            chunk_mats=np.zeros((batch, v_heads, chunks, 3, 16, 16), np.float32),
            chunk_delta=np.zeros((batch, v_heads, chunks, chunk, v_dim), np.float32),
        )
    made = kernel(text, f"gated_delta_{form}", template, include, constants, version, **how)
    args = {name: value for name, value in args.items() if name in {p.name for p in made.parameters}}
    result = made.run(args, (32, lines, batch * v_heads), (32, 4, 1), **_run_options(how))
    return (result["y"], result["state_out"]), result
