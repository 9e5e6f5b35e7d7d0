"""What the published accuracy grid leaves out: formats, row counts, attention, the recurrence, compiled calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu
from mlx_lm.models.gated_delta import compute_g

from ..ops import gated_delta_scan
from ..ops.attention_prefill import attention_prefill
from ..ops.gqa_decode import QuantisedKV, dequantised, gqa_decode
from ..ops.grouped_qmm import gather_sum, grouped_qmm
from ..ops.matrix import Matrix, Norm
from ..ops.moe_decode import MAX_ROWS, Experts, moe_decode
from ..ops.projections import projections
from ..ops.route_plan import route_plan
from ..policy import Policy
from ..routes import separate
from . import grid
from .common import errors, float64, route_of, same_bits
from .grid import SCHEMES, SEED, Path, Scheme, Sizes

#: Policy of each engine: under "stock" an operation is mlx-lm's own calls.
POLICIES = {"qwen_metal": Policy(), "mlx": Policy(kernels="stock")}

QWEN = Sizes(hidden=2048, inner=512, experts=256, top_k=8)
SMALL = Sizes(hidden=2048, inner=512, experts=16, top_k=8)

#: Rows either side of tiles and of the decode boundary.
ODD = (1, 7, 31, 33, 63, 65, 1000, 2047)

FORMATS = (
    *(Scheme("affine", bits, 64) for bits in (5, 6)),
    *(Scheme("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 128)),
    Scheme("mxfp8", 8, 32),
    Scheme("nvfp4", 4, 16),
)
PATHS = (
    Path("generation_1", "generation", 1),
    Path("generation_8", "generation", 8),
    Path("prompt_65", "prompt", 65),
    Path("dense_1", "dense", 1),
    Path("dense_65", "dense", 65),
)
ODD_PATHS = tuple(Path(f"{kind}_{n}", kind, n) for kind in ("prompt", "dense") for n in ODD)

#: Tokens of the recurrence, and heads (key, value) that keep float64 in numpy bearable.
STEPS, SCAN_HEADS, HEAD = 4096, (2, 4), 128

#: Query heads, KV heads and head size of Qwen3.6-35B-A3B, and cached tokens either side of a 256 boundary.
HEADS, KV_HEADS, HEAD_DIM, CONTEXTS = 16, 2, 256, (1, 255, 257, 4096)


@dataclass(frozen=True)
class Part:
    """A named piece of the list: how many rows an engine it has, and what yields them."""

    title: str
    rows: int
    run: Callable[..., Iterator[dict[str, Any]]]


def parts() -> list[Part]:
    """Everything that ``--wide`` measures, in order."""
    four = (Scheme("affine", 4, 64), Scheme("affine", 8, 64))
    return [
        _of_grid("formats", grid.cases(FORMATS, PATHS), SMALL),
        _of_grid("float16", grid.cases(SCHEMES, PATHS), SMALL, mx.float16),
        _of_grid("the shapes of Qwen3.6-35B-A3B", grid.cases(four, PATHS), QWEN),
        _of_grid("odd row counts", grid.cases(four[:1], ODD_PATHS), SMALL),
        Part("mixed pack", 6, mixed_pack),
        Part("attention", 3 * len(CONTEXTS) + 3, attention),
        Part("recurrence", 4, recurrence),
        Part("compiled", 4, compiled),
    ]


def _of_grid(title: str, wanted: Sequence[grid.Case], sizes: Sizes, dtype: mx.Dtype = mx.bfloat16) -> Part:
    def run(engines, name, progress):
        return grid.run(wanted, engines, name, sizes, dtype, progress)

    return Part(title, len(wanted), run)


def _row(
    engine: str,
    name: str,
    op: str,
    run: Callable[[Policy], mx.array],
    want: np.ndarray,
    dtype: mx.Dtype,
    progress: Any,
    same_as: Optional[Callable[[Policy], mx.array]] = None,
    **about: Any,
) -> dict[str, Any]:
    """One measured row. ``same_as``: what a second run must equal, if not the first one again."""
    progress.at(f"{about['path']}, {about['shape']}, {engine}")
    policy = POLICIES[engine]
    with separate() as counts:
        first, second = grid.twice(lambda: run(policy))
        if same_as is not None:
            second = same_as(policy)
        route = route_of(counts(), op) if engine == "qwen_metal" else "mlx"
    got = float64(first.astype(dtype)).reshape(want.shape)
    progress.step()
    floor = dtype if dtype != mx.float32 else mx.bfloat16
    return {
        **{"scheme": _name(dtype), "bits": dtype.size * 8, "group_size": 0, "input": "normal"},
        **about,
        "dtype": _name(dtype),
        "backend": name,
        "engine": engine,
        **errors(got, want, floor),
        "repeat_equal": same_bits(first, second),
        "sampled": False,
        "digest": grid.digest_of(first),
        "op": op,
        "route": route,
        "quantisation_error": None,
    }


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([SEED, seed]).standard_normal(shape, np.float32)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


# -- a mixed pack: the whole block of experts ---------------------------------------------------


def mixed_pack(engines, name, progress) -> Iterator[dict[str, Any]]:
    """Down 3-bit, gate and up 2 or 3, through the whole block: 1, 8 and 31 rows."""
    base = grid.base_weights(SMALL)
    down = grid.Pack(base, Scheme("affine", 3, 64), SMALL).matrix("down")
    for bits in (2, 3):
        gate = grid.Pack(base, Scheme("affine", bits, 64), SMALL).matrix("gate_up")
        experts = Experts(gate, grid.rolled(gate), down)
        weights = [float64(m.dequantised()) for m in experts]
        for rows in (1, 8, 31):
            x, ids, scores = _routed(rows)
            want = _block64(float64(x), weights, ids, scores)
            for engine in engines:
                yield _row(
                    engine,
                    name,
                    "moe_decode" if rows <= MAX_ROWS else "grouped_qmm",
                    lambda policy: _block(x, experts, mx.array(ids), mx.array(scores), policy),
                    want,
                    mx.bfloat16,
                    progress,
                    path=f"mixed_{rows}",
                    shape=f"gate and up {bits}-bit, down 3-bit",
                    scheme="affine",
                    bits=bits,
                    group_size=64,
                )


def _routed(rows: int) -> tuple[mx.array, np.ndarray, np.ndarray]:
    random = np.random.default_rng([SEED, rows])
    ids = random.random((rows, SMALL.experts)).argsort(axis=-1)[:, : SMALL.top_k].astype(np.uint32)
    scores = random.random(ids.shape, np.float32) + np.float32(0.1)
    x = mx.array(_random(rows, SMALL.hidden, seed=rows)).astype(mx.bfloat16)
    return x, ids, scores / scores.sum(axis=-1, keepdims=True)


def _block(x: mx.array, experts: Experts, ids: mx.array, scores: mx.array, policy: Policy) -> mx.array:
    if x.shape[0] <= MAX_ROWS:
        return moe_decode(x, experts, ids, scores, policy=policy)
    plan = route_plan(ids, SMALL.experts, policy=policy)
    activation = grouped_qmm(x, experts[:2], plan, policy=policy)
    y = grouped_qmm(activation, (experts.down,), plan, scores, policy)
    return gather_sum(y, plan, dtype=x.dtype, policy=policy)


def _block64(x: np.ndarray, weights: list[np.ndarray], ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    gate, up, down = weights
    out = np.zeros_like(x)
    for row, (chosen, shares) in enumerate(zip(ids, scores.astype(np.float64))):
        for e, share in zip(chosen, shares):
            out[row] += share * (down[e] @ (_silu(gate[e] @ x[row]) * (up[e] @ x[row])))
    return out


# -- attention ----------------------------------------------------------------------------------


def attention(engines, name, progress) -> Iterator[dict[str, Any]]:
    """One token over 1 to 4,096 cached, float and quantised; and causal prefills."""
    for length in CONTEXTS:
        for bits in (16, 8, 4):
            yield from _attention(engines, name, progress, 1, length, bits)
    for tokens, length in ((33, 33), (65, 300), (257, 257)):
        yield from _attention(engines, name, progress, tokens, length, 16)


def _attention(engines, name, progress, tokens: int, length: int, bits: int) -> Iterator[dict[str, Any]]:
    """Rows of one shape: ``tokens`` queries, the last of ``length`` positions."""
    dtype, scale = mx.bfloat16, HEAD_DIM**-0.5
    q, k, v = (
        mx.array(_random(1, heads, n, HEAD_DIM, seed=seed)).astype(dtype)
        for seed, (heads, n) in enumerate(((HEADS, tokens), (KV_HEADS, length), (KV_HEADS, length)))
    )
    quantised = QuantisedKV(64, bits) if bits < 16 else None
    keys, values = (mx.quantize(t, group_size=64, bits=bits) if quantised else t for t in (k, v))
    exact = [float64(dequantised(t, quantised) if quantised else t)[0] for t in (keys, values)]
    want = _attention64(float64(q)[0], *exact, scale)
    gate = mx.array(_random(1, tokens, HEADS * HEAD_DIM, seed=3)).astype(dtype)
    want = want * (1 / (1 + np.exp(-float64(gate)[0])))
    op = gqa_decode if tokens == 1 else attention_prefill

    def run(policy: Policy) -> mx.array:
        extra = {} if tokens == 1 else {"mask": "causal"}
        # mlx-lm's quantised attention scales its queries in place: each call gets its own.
        return op(mx.array(q), keys, values, scale, gate=gate, quantised=quantised, policy=policy, **extra)

    scheme = dict(scheme="affine", bits=bits, group_size=64) if quantised else {}
    for engine in engines:
        yield _row(
            engine, name, op.__name__, run, want, dtype, progress,
            path=f"attention_{tokens}", shape=f"{length} keys", **scheme,
        )  # fmt: skip


def _attention64(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Causal attention (T, heads * dim) of q (heads, T, dim) in float64."""
    heads, tokens, _ = q.shape
    k, v = (np.repeat(t, heads // len(t), axis=0) for t in (k, v))
    scores = scale * q @ k.transpose(0, 2, 1)
    last = np.arange(k.shape[1] - tokens, k.shape[1])[:, None]
    scores = np.where(np.arange(k.shape[1]) <= last, scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = (shares / shares.sum(axis=-1, keepdims=True)) @ v
    return out.transpose(1, 0, 2).reshape(tokens, -1)


# -- the recurrence -----------------------------------------------------------------------------


def recurrence(engines, name, progress) -> Iterator[dict[str, Any]]:
    """Output and last state after 4,096 steps, for bfloat16 and float32 inputs; the state is float32."""
    heads, value_heads = SCAN_HEADS
    q, k = (_random(1, STEPS, heads, HEAD, seed=seed) for seed in (0, 1))
    q, k = q / np.linalg.norm(q, axis=-1, keepdims=True) * HEAD**-0.5, k / np.linalg.norm(k, axis=-1, keepdims=True)
    v = _random(1, STEPS, value_heads, HEAD, seed=2)
    random = np.random.default_rng(SEED)
    g, beta = (random.uniform(low, 1, (1, STEPS, value_heads)) for low in (0.9, 0.0))
    for dtype in (mx.bfloat16, mx.float32):
        inputs = [mx.array(a.astype(np.float32)).astype(dtype) for a in (q, k, v, beta)]
        decay = mx.array(g.astype(np.float32))
        want = _recurrence64(*(float64(a)[0] for a in (*inputs[:3], decay, inputs[3])))

        def run(policy: Policy, part: int) -> mx.array:
            qq, kk, vv, bb = inputs
            return gated_delta_scan.gated_delta_scan(qq, kk, vv, decay, bb, policy=policy)[part]

        for part, (what, exact) in enumerate(zip(("output", "state"), want)):
            for engine in engines:
                yield _row(
                    engine,
                    name,
                    "gated_delta_scan",
                    lambda policy, part=part: run(policy, part),
                    exact.reshape(-1, HEAD),
                    # The state is float32 whatever the inputs are.
                    mx.float32 if what == "state" else dtype,
                    progress,
                    path=f"recurrence_{STEPS}",
                    shape=f"{what}, {_name(dtype)} inputs",
                )


def _recurrence64(q, k, v, g, beta) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (T, heads, dim) and the last state (heads, dim, dim) in float64."""
    repeat = v.shape[1] // q.shape[1]
    q, k = np.repeat(q, repeat, axis=1), np.repeat(k, repeat, axis=1)
    state, out = np.zeros((v.shape[1], HEAD, HEAD)), np.empty_like(v)
    for t in range(len(v)):
        state *= g[t][:, None, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state += delta[:, :, None] * k[t][:, None]
        out[t] = np.einsum("hvk,hk->hv", state, q[t])
    return out, state


# -- compiled -----------------------------------------------------------------------------------


def compiled(engines, name, progress) -> Iterator[dict[str, Any]]:
    """Operations inside ``mx.compile``, which must give the bits they give outside; and what mlx-lm compiles."""
    dtype = mx.bfloat16
    x, other = (mx.array(_random(8, 2048, seed=seed)).astype(dtype) for seed in (0, 1))
    x64, other64 = float64(x), float64(other)
    a_log, dt = (mx.array(_random(2048, seed=seed)).astype(mx.float32) for seed in (2, 3))
    softplus = np.logaddexp(x64 + float64(dt), 0)
    norm, matrix, residual = _normed(dtype)
    mean = np.mean(x64**2, axis=-1, keepdims=True)
    h = x64 / np.sqrt(mean + norm.eps) * float64(norm.weight)
    chained = float64(residual) + h @ float64(matrix.dequantised()).T

    def fused(x, policy):
        return projections(x, [matrix], norm, residual, policy=policy)[0]

    jobs = [
        ("swiglu", lambda _: swiglu(x, other), _silu(x64) * other64, dtype),
        ("compute_g", lambda _: compute_g(a_log, x, dt), np.exp(-np.exp(float64(a_log)) * softplus), mx.float32),
        ("sigmoid gate", lambda _: mx.compile(_gated)(x, other), x64 / (1 + np.exp(-other64)), dtype),
    ]
    for what, run, want, kind in jobs:
        # These are mlx-lm's own compiled functions: the same call whichever engine is asked for.
        for engine in engines:
            yield {
                **_row(engine, name, what, run, want, kind, progress, path="compiled", shape=what),
                "route": "mlx",
            }
    for engine in engines:
        policy = POLICIES[engine]
        call = mx.compile(lambda x, policy=policy: fused(x, policy))
        yield _row(
            engine, name, "projections", lambda _: call(x), chained, dtype, progress,
            same_as=lambda policy: fused(x, policy), path="compiled", shape="norm, projection, residual",
        )  # fmt: skip


def _gated(x: mx.array, gate: mx.array) -> mx.array:
    return x * mx.sigmoid(gate)


def _normed(dtype: mx.Dtype) -> tuple[Norm, Matrix, mx.array]:
    """A norm, a 4-bit matrix (2048, 2048) and a residual (8, 2048)."""
    weight = mx.array(_random(2048, 2048, seed=4) * np.float32(grid.SPREAD)).astype(dtype)
    matrix = Matrix(*mx.quantize(weight, group_size=64, bits=4), group_size=64, bits=4, mode="affine")
    scale = mx.array(1 + 0.1 * _random(2048, seed=5)).astype(dtype)
    return Norm(scale, 1e-6), matrix, mx.array(_random(8, 2048, seed=6)).astype(dtype)
