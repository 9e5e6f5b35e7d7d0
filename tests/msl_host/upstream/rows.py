"""The self-test's rows: what is measured, and what it should be."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import mlx.core as mx
import numpy as np

from .. import build as building
from ..cases import DEFECTS, LEGAL
from ..metal_kernel import load_module, metal_on_cpu
from ..run import to_bfloat
from . import headers, launch
from . import reference as ref
from .instantiations import ALL, KNOWN_FAILURES

SEED = 20261005
SEEDS = 20


@dataclass(frozen=True)
class Row:
    """One line of the table.

    low, high: what `measured` may be, both None for a line that is only shown; ideal: where there is
    only an upper bound, the best there can be.
    """

    group: str
    name: str
    measured: float
    expected: str
    low: float | None = None
    high: float | None = None
    note: str = ""
    ideal: float = 0.0
    seconds: float = field(default=0.0)

    @property
    def ok(self):
        """True where the measured value is in its range."""
        above = self.low is None or self.measured >= self.low
        return bool(above and (self.high is None or self.measured <= self.high))

    @property
    def strain(self):
        """How much of the allowed range is used up: 1 at its edge."""
        if self.high is None:
            return 0.0
        if self.low is None:
            return abs(self.measured - self.ideal) / (self.high - self.ideal)
        half = (self.high - self.low) / 2
        return abs(self.measured - self.low - half) / half if half else float(not self.ok)

    def as_json(self):
        """For build/msl-selftest.json."""
        return asdict(self) | {"ok": self.ok, "strain": round(self.strain, 4)}


def _near(group, name, measured, published, tolerance=0.25):
    return Row(group, name, measured, f"{published} +-{tolerance:.0%}", published * (1 - tolerance),
               published * (1 + tolerance))  # fmt: skip


def _at_most(group, name, measured, limit, note=""):
    return Row(group, name, measured, f"<= {limit:g}", None, limit, note)


def _over_floor(group, name, measured, limit):
    """An error as a multiple of the smallest possible one."""
    return Row(group, name, measured, f"<= {limit:g}", None, limit, ideal=1.0)


def _equal(group, name, measured, wanted, note=""):
    return Row(group, name, measured, f"= {wanted:g}", wanted, wanted, note)


def _at_least(group, name, measured, wanted, note=""):
    return Row(group, name, measured, f">= {wanted:g}", wanted, None, note)


def _normal(rng, *shape):
    return to_bfloat(rng.standard_normal(shape).astype(np.float32))


# ---- quantised matrix times vector ----

# Published for MLX 0.32.3 on an M5 Ultra: error over the rounding to bfloat, gate_up shape.
_PUBLISHED = {"normal": {2: 4.3, 3: 5.8, 4: 4.3}, "|normal|": {2: 6.2, 3: 12.3, 4: 7.5}}
_PUBLISHED_PROMPT = {
    "normal": {2: 1.00, 3: 1.20, 4: 1.34, 8: 1.41},
    "|normal|": {2: 1.00, 3: 1.24, 4: 1.48, 8: 1.43},
}
_OUTPUTS, _DEPTH, _EXPERTS = 2304, 5120, 2


def _inputs(rng, kind, rows, depth):
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    return to_bfloat(np.abs(x) if kind == "|normal|" else x)


def _mean_ratio(result, expected):
    """Error over floor of each row, averaged."""
    return float(np.mean([ref.relative(r, e) / ref.floor(e) for r, e in zip(ref.wide(result), expected)]))


def _versions():
    old = headers.old()
    found = [("0.32.4", headers.installed())]
    return ([("0.32.3", old)] if old else []) + found


def quantised():
    """gather_qmv, 2304 x 5120, one expert a seed: the known error of 0.32.3, and none in 0.32.4."""
    rng = np.random.default_rng(SEED)
    for bits in (2, 3, 4):
        weights = rng.standard_normal((_EXPERTS, _OUTPUTS, _DEPTH), dtype=np.float32) * np.float32(0.02)
        codes, scales, biases, exact = ref.quantise(weights, bits)
        indices = np.arange(SEEDS) % _EXPERTS
        for kind, published in _PUBLISHED.items():
            x = _inputs(rng, kind, SEEDS, _DEPTH)
            expected = np.empty((SEEDS, _OUTPUTS))
            for expert in range(_EXPERTS):
                expected[indices == expert] = ref.wide(x[indices == expert]) @ exact[expert].T
            for version, include in _versions():
                y, _ = launch.gather_qmv(include, codes, scales, biases, x[:, None], indices, bits)
                name = f"gather_qmv {bits}-bit, {kind}, MLX {version}"
                ratio = _mean_ratio(y, expected)
                if version == "0.32.3":
                    yield _near("quantised", name, ratio, published[bits])
                else:
                    yield _over_floor("quantised", name, ratio, 1.01)


def prompt():
    """affine_qmm_t on SIMD-group matrices: the weights are rounded to bfloat in the tile."""
    rng = np.random.default_rng(SEED + 1)
    rows, depth, outputs = 32, 1024, 64
    for bits in (2, 3, 4, 8):
        codes, scales, biases, exact = ref.quantise(rng.standard_normal((outputs, depth)) * 0.02, bits)
        for kind, published in _PUBLISHED_PROMPT.items():
            x = _inputs(rng, kind, rows, depth)
            expected = ref.wide(x) @ exact.T
            y, _ = launch.qmm_t(headers.installed(), codes, scales, biases, x, bits)
            ratio = ref.relative(ref.wide(y), expected) / ref.floor(expected)
            yield _near("prompt", f"qmm_t {bits}-bit, {kind}, MLX 0.32.4", ratio, published[bits], 0.1)


def reproduction():
    """The upstream reproduction: 4 bit, 8 experts, N 512, K 2048; error of 0.32.3 over that of 0.32.4."""
    if not headers.old():
        return
    rng = np.random.default_rng(SEED)
    codes, scales, biases, exact = ref.quantise(rng.standard_normal((8, 512, 2048)) * 0.02, 4)
    for rows in (1, 2, 4, 8, 16):
        x = _inputs(rng, "normal", rows, 2048)
        experts = np.arange(rows) % 8
        dense, gathered = ref.wide(x) @ exact[0].T, np.einsum("rk,rnk->rn", ref.wide(x), exact[experts])
        errors = {}
        for version, include in _versions():
            # MLX's host takes another kernel for more than one row.
            matvec = launch.qmv if rows == 1 else launch.qmv_wide
            y, _ = matvec(include, codes[0], scales[0], biases[0], x, 4)
            z, _ = launch.gather_qmv(include, codes, scales, biases, x[:, None], experts, 4)
            errors[version] = ref.relative(ref.wide(y), dense), ref.relative(ref.wide(z), gathered)
        dense_ratio, gathered_ratio = (errors["0.32.3"][i] / errors["0.32.4"][i] for i in (0, 1))
        if rows == 1:
            yield _near("reproduction", "dense, M = 1", dense_ratio, 5.2)
            yield _near("reproduction", "gathered, M = 1", gathered_ratio, 5.2)
        else:
            yield _near("reproduction", f"dense, M = {rows}", dense_ratio, 1.0, 0.02)
            low, high = 4.2 * 0.75, 5.2 * 1.25
            yield Row("reproduction", f"gathered, M = {rows}", gathered_ratio, "4.2 to 5.2, +-25%", low, high)
        worst = max(errors["0.32.4"][0] / ref.floor(dense), errors["0.32.4"][1] / ref.floor(gathered))
        yield _over_floor("reproduction", f"0.32.4 over the floor, M = {rows}", worst, 1.01)


# ---- mlx-lm's gated-delta kernels, through mlx-lm's own Python ----


def _gated_delta_inputs(module, steps):
    k_heads, v_heads, dim = 2, 4, 128
    mx.random.seed(SEED)
    q, k = (mx.random.normal((1, steps, k_heads, dim)) for _ in range(2))
    q, k = module.normalize_qk(q, k, inv_scale=dim**-0.5, eps=1e-6)
    v = mx.random.normal((1, steps, v_heads, dim))
    g = mx.exp(-mx.random.uniform(shape=(1, steps, v_heads)))
    beta = mx.sigmoid(mx.random.normal((1, steps, v_heads)))
    state = mx.random.normal((1, v_heads, dim, dim)) * 0.1
    return q, k, v, g, beta, state


def gated_delta():
    """plain, explicit-tree and packed forms, and the module's own dispatch, all in float32."""
    group, limit = "gated delta (mlx-lm)", 2e-7
    with metal_on_cpu() as options:
        module = load_module("mlx_lm.models.gated_delta")
        inputs = _gated_delta_inputs(module, 32)
        exact = ref.gated_delta(*inputs)
        forms = {
            "plain": module.gated_delta_kernel_unpacked,
            "explicit tree": module.gated_delta_kernel_xtree,
            "packed": module.gated_delta_kernel,
        }
        results = {name: form(*inputs) for name, form in forms.items()}
        for name, (y, state) in results.items():
            yield _at_most(group, f"{name}: y", ref.relative(np.array(y), exact[0]), limit)
            yield _at_most(group, f"{name}: state", ref.relative(np.array(state), exact[1]), limit)
        for name in ("explicit tree", "packed"):
            same = all(mx.array_equal(a, b).item() for a, b in zip(results[name], results["plain"]))
            yield _equal(group, f"{name} equals plain, bit for bit", same, True)
        q, k, v, _, _, state = inputs
        a, b = mx.random.normal((2, 1, 32, 4))
        a_log, bias = mx.random.normal((2, 4))
        launches = len(options.log)
        y, _ = module.gated_delta_update(q, k, v, a, b, a_log, bias, state)
        expected = ref.gated_delta(q, k, v, module.compute_g(a_log, a, bias), mx.sigmoid(b), state)[0]
        note = options.log[-1][0] if len(options.log) > launches else "no kernel ran"
        error = ref.relative(np.array(y), expected) if len(options.log) > launches else np.inf
        yield _at_most(group, "gated_delta_update", error, limit, note)


# ---- attention, GEMM, and the same under check ----


def _floor_row(group, name, result, expected, limit):
    return _over_floor(group, name, ref.relative(result, expected) / ref.floor(expected), limit)


def attention():
    """sdpa_vector in one and two passes: head dim 256, 16 query heads on 2."""
    rng, include, scale = np.random.default_rng(SEED), headers.installed(), 256**-0.5
    q, k, v = _normal(rng, 16, 1, 256), _normal(rng, 2, 1000, 256), _normal(rng, 2, 1000, 256)
    mask = rng.random((16, 1, 1000)) < 0.7
    one, _ = launch.sdpa_vector(include, q, k, v, scale)
    masked, _ = launch.sdpa_vector(include, q, k, v, scale, mask)
    two, _ = launch.sdpa_two_pass(include, q, k, v, scale)
    expected = ref.attention(q, k, v, scale)
    yield _floor_row("attention", "sdpa_vector", ref.wide(one), expected, 1.01)
    yield _floor_row("attention", "sdpa_vector, mask", ref.wide(masked), ref.attention(q, k, v, scale, mask), 1.01)
    # Partial results are bfloat: two roundings, one of them of 64 independent parts.
    yield _floor_row("attention", "sdpa_vector, two passes", ref.wide(two), expected, 1.5)
    for length, kv_length, causal in ((64, 64, False), (50, 75, True)):
        q, k, v = _normal(rng, 4, length, 128), _normal(rng, 2, kv_length, 128), _normal(rng, 2, kv_length, 128)
        expected = ref.attention(q, k, v, 128**-0.5, causal=causal)
        for matrix_units, name in ((False, "steel"), (True, "matrix units")):
            out, _ = launch.steel_attention(include, q, k, v, causal, matrix_units)
            yield _floor_row("attention", f"{name}, {length} x {kv_length}", ref.wide(out), expected, 1.01)


def gemm():
    """Dense GEMM on SIMD-group matrices, matrix units and tensor slices, aligned and ragged."""
    rng, include = np.random.default_rng(SEED), headers.installed()
    for rows, depth, columns in ((64, 128, 64), (50, 96, 72)):
        a, b = _normal(rng, rows, depth), _normal(rng, columns, depth)
        expected = ref.wide(a) @ ref.wide(b).T
        for name, run in (
            ("steel", launch.steel_gemm),
            ("matrix units", lambda *args: launch.steel_gemm(*args, matrix_units=True)),
            ("tensor slices", launch.thin_gemm),
        ):
            out, _ = run(include, a, b)
            yield _floor_row("GEMM", f"{name}, {rows} x {depth} x {columns}", ref.wide(out), expected, 1.01)
    half_a, half_b = rng.standard_normal((50, 96)).astype(np.float16), rng.standard_normal((96, 72)).astype(np.float16)
    out, _ = launch.steel_gemm(include, half_a, half_b, transpose_b=False, dtype="half")
    expected = half_a.astype(np.float64) @ half_b.astype(np.float64)
    rounding = ref.rms(expected.astype(np.float16) - expected) / ref.rms(expected)
    yield _over_floor("GEMM", "steel, half, not transposed", ref.relative(out, expected) / rounding, 1.01)


def _mlx_gated_delta_inputs(steps):
    rng = np.random.default_rng(SEED)
    q, k = (rng.standard_normal((1, steps, 2, 128)) for _ in range(2))
    q, k = q / np.linalg.norm(q, axis=-1, keepdims=True) / 128**0.5, k / np.linalg.norm(k, axis=-1, keepdims=True)
    v, g, beta = rng.standard_normal((1, steps, 4, 128)), np.exp(-rng.random((1, steps, 4))), rng.random((1, steps, 4))
    bits = [to_bfloat(np.float32(a)) for a in (q, k, v, g, beta)]
    return *bits, (rng.standard_normal((1, 4, 128, 128)) * 0.1).astype(np.float32)


def mlx_gated_delta():
    """MLX's own gated-delta kernels, one of them on matrix units."""
    inputs = _mlx_gated_delta_inputs(32)
    y, state = ref.gated_delta(*map(ref.wide, inputs[:5]), inputs[5])
    for form in ("seq", "fused_chunk", "fused_nax"):
        (out, last), _ = launch.gated_delta(headers.installed(), form, *inputs)
        yield _floor_row("gated delta (MLX)", f"{form}: y", ref.wide(out), y, 1.01)
        yield _at_most("gated delta (MLX)", f"{form}: state", ref.relative(last, state), 2e-7)


# What the checks say about kernels as shipped; reasons are in docs/HOST_EXECUTOR.md.
_SHIPPED_FINDINGS = {
    "matrix-unit GEMM, ragged": {"barrier-divergence"},
    "tensor-slice GEMM, ragged": {"same-value-write"},
    "gather_qmv, ragged": {"same-value-write"},
    "gated delta fused_nax": {"race-read-after-write"},
}


def _shipped():
    rng, include = np.random.default_rng(SEED), headers.installed()
    q, k, v = _normal(rng, 16, 1, 256), _normal(rng, 2, 200, 256), _normal(rng, 2, 200, 256)
    codes, scales, biases, _ = ref.quantise(rng.standard_normal((2, 18, 512)) * 0.02, 4)
    x, a, b = _normal(rng, 2, 1, 512), _normal(rng, 50, 96), _normal(rng, 72, 96)
    inputs = _mlx_gated_delta_inputs(32)
    return {
        "sdpa_vector": lambda **how: launch.sdpa_vector(include, q, k, v, 0.06, **how),
        "sdpa two passes": lambda **how: launch.sdpa_two_pass(include, q, k, v, 0.06, **how),
        "gather_qmv, aligned": lambda **how: launch.gather_qmv(
            include, codes[:, :16], scales[:, :16], biases[:, :16], x, [0, 1], 4, **how
        ),
        "gather_qmv, ragged": lambda **how: launch.gather_qmv(include, codes, scales, biases, x, [0, 1], 4, **how),
        "qmm_t, ragged": lambda **how: launch.qmm_t(include, codes[0], scales[0], biases[0], x[:, 0], 4, **how),
        "steel GEMM, ragged": lambda **how: launch.steel_gemm(include, a, b, **how),
        "matrix-unit GEMM, ragged": lambda **how: launch.steel_gemm(include, a, b, matrix_units=True, **how),
        "tensor-slice GEMM, ragged": lambda **how: launch.thin_gemm(include, a, b, **how),
        "gated delta seq": lambda **how: launch.gated_delta(include, "seq", *inputs, **how),
        "gated delta fused_nax": lambda **how: launch.gated_delta(include, "fused_nax", *inputs, **how),
    }


def shipped_kernels():
    """MLX's kernels in the checked build: nothing but what is known about them; and what the check costs."""
    costs = []
    for name, run in _shipped().items():
        _, fast = run()
        _, checked = run(checked=True)
        results = checked if isinstance(checked, tuple) else (checked,)
        kinds = {f.kind for r in results for f in r.report}
        expected = _SHIPPED_FINDINGS.get(name, set())
        where = next((f"{f.file.split('/')[-1]}:{f.line}" for r in results for f in r.report), "")
        note = " ".join([*sorted(kinds), where]) if kinds else "no finding"
        yield _equal("MLX under check", name, len(kinds ^ expected), 0, note)
        total = [sum(r.seconds for r in (t if isinstance(t, tuple) else (t,))) for t in (fast, checked)]
        costs.append(total[1] / total[0])
    yield Row("cost", "checked over fast, MLX's kernels, median", float(np.median(costs)), "shown", note=_range(costs))


def _range(values):
    return f"{min(values):.1f} to {max(values):.1f}"


# ---- seeded defects and legal kernels ----


def build_cases():
    """A kernel for each case and each compiler installed."""
    cases = [*DEFECTS.values(), *LEGAL.values()]
    return {(c, case.path): case.kernel(compiler=c) for c in building.available_compilers() for case in cases}


def defects(built):
    """Every seeded defect is found at its line; no legal kernel is reported; by each compiler installed.

    `built` is a future of build_cases.
    """
    kernels = built.result()
    for compiler in building.available_compilers():
        wrong = []
        for case in DEFECTS.values():
            report = case.run(kernels[compiler, case.path]).report
            if {(f.kind, f.line) for f in report} != case.expected:
                wrong.append(case.name)
        false_alarms = [c.name for c in LEGAL.values() if _report(c, kernels[compiler, c.path])]
        group = f"defects ({compiler.short_name})"
        yield _at_least(group, "seeded", len(DEFECTS), 24)
        yield _equal(group, "found with kind and line", len(DEFECTS) - len(wrong), len(DEFECTS), " ".join(wrong))
        yield _at_least(group, "legal kernels", len(LEGAL), 12)
        yield _equal(group, "legal kernels reported", len(false_alarms), 0, " ".join(false_alarms))


def _report(case, kernel):
    return case.run(kernel).report + case.run(kernel, lockstep=True).report


# ---- compile sweep ----


def compile_all():
    """Compile every instantiation afresh; returns processor seconds of each, and failures by name."""
    include, seconds, failed = headers.installed(), [], {}
    for entry in ALL:
        try:
            built = building.build(entry.source, entry.name, entry.template_args, entry.constants, includes=(include,),
                                   metal_version=entry.version, reuse=False)  # fmt: skip
            seconds.append(built.seconds)
        except building.CompileError as error:
            failed[entry.name] = next((line for line in str(error).split("\n") if "error:" in line), str(error))
    return seconds, failed


def sweep(compiled):
    """Instantiations over the wheel's headers; `compiled` is a future of compile_all."""
    seconds, failed = compiled.result()
    yield _at_least("sweep", "instantiations that compile", len(seconds), 36, f"of {len(ALL)}")
    unknown = sorted(set(failed) ^ set(KNOWN_FAILURES))
    note = "; ".join(f"{name}: {KNOWN_FAILURES.get(name, reason)}" for name, reason in failed.items())
    yield _equal("sweep", "failures not named before", len(unknown), 0, note)
    yield _at_most("cost", "compiler seconds a kernel, median", float(np.median(seconds)), 0.6, _range(seconds))


GROUPS = (quantised, prompt, reproduction, gated_delta, attention, gemm, mlx_gated_delta, shipped_kernels)


def measure():
    """Rows of all groups, each with the wall-clock seconds since the row before.

    The sweep and the seeded defects compile beside them, in a second process at a time.
    """
    with _on_cpu(), ThreadPoolExecutor(1) as pool:
        built, compiled = pool.submit(build_cases), pool.submit(compile_all)
        for rows in (*(group() for group in GROUPS), defects(built), sweep(compiled)):
            started = time.perf_counter()
            for row in rows:
                now = time.perf_counter()
                yield Row(**{**row.__dict__, "seconds": round(now - started, 3)})
                started = now


@contextlib.contextmanager
def _on_cpu():
    kept = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(kept)
