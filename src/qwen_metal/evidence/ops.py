"""Every CPU op beside what this machine can do at most, measured in the same run.

    python -m qwen_metal.evidence.ops --json F

Each row alternates the op with its limit and gives medians: decode against the
read bandwidth over the same number of bytes, prefill against the peak of
multiply-adds, with one thread and with two. Weights rotate over more memory
than most caches hold. ``error_ratio`` is the error against float64 of the
dequantised weights over that of rounding the exact answer to the output dtype.

The ops along a sequence are rows of ``ops_sequence``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from typing import Callable, Iterator, Optional

import mlx.core as mx
import numpy as np

from .. import extension
from ..ops.grouped_qmm import grouped_qmm
from ..ops.matrix import Matrix
from ..ops.moe_decode import Experts, moe_decode
from ..ops.projections import projections
from ..ops.route_plan import route_plan
from . import ops_sequence
from .ops_sequence import FOOTPRINT, Case

#: Sizes of the full model: hidden, inner size of an expert, experts, experts a token.
HIDDEN, INNER, EXPERTS, TOP_K = 2048, 512, 256, 8
ROWS = 512

#: Share of the limit that each row should reach: with one thread; with two, None where the pair is
#: judged by its gain over one thread instead.
TARGETS = {
    ("projections", "read", "bfloat16"): (0.70, 0.75),
    ("projections", "read", "float32"): (0.65, 0.65),
    ("moe_decode", "read", "bfloat16"): (0.70, 0.75),
    ("moe_decode", "read", "float32"): (0.65, 0.65),
    ("projections", "fma", "bfloat16"): (0.75, None),
    ("grouped_qmm", "fma", "bfloat16"): (0.60, None),
}


def random_matrix(rng, shape: tuple, bits: int, dtype: mx.Dtype) -> Matrix:
    """Random codes in groups of 64: an eighth as costly to make as weights to quantise."""
    *lead, columns = shape
    words = rng.integers(0, 2**32, 1 << 20, dtype=np.uint32)
    weight = mx.array(np.resize(words, (*lead, columns * bits // 32)))
    scales = rng.uniform(0.5, 1.5, (*lead, columns // 64)).astype(np.float32) * 0.02 / 2**bits
    scales = mx.array(scales).astype(dtype)
    biases = (-(2 ** (bits - 1)) * scales).astype(dtype)
    return Matrix(weight, scales, biases, None, None, 64, bits, "affine")


def values(m: Matrix) -> np.ndarray:
    """The weights in float64, from the stored numbers."""
    words = np.array(m.weight)[..., None] >> np.arange(0, 32, m.bits, dtype=np.uint32)
    codes = (words & (2**m.bits - 1)).reshape(*words.shape[:-2], -1).astype(np.float64)
    scales, biases = (np.array(a.astype(mx.float32), np.float64) for a in (m.scales, m.biases))
    return codes * np.repeat(scales, 64, -1) + np.repeat(biases, 64, -1)


def nbytes(*matrices: Matrix) -> int:
    return sum(a.nbytes for m in matrices for a in (m.weight, m.scales, m.biases))


def error_ratio(answer: mx.array, exact: np.ndarray) -> float:
    """For float32 answers, whose rounding no test can see, the relative RMSE itself."""

    def rmse(a: mx.array) -> float:
        return float(np.sqrt(np.mean((np.array(a.astype(mx.float32), np.float64) - exact) ** 2)))

    if answer.dtype == mx.float32:
        return rmse(answer) / float(np.sqrt(np.mean(exact**2)))
    return rmse(answer) / rmse(mx.array(exact.astype(np.float32)).astype(answer.dtype))


def rows_of(rng, rows: int, dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal((rows, HIDDEN)).astype(np.float32)).astype(dtype)


def dense(rows: int, bits: int, dtype: mx.Dtype) -> tuple[Case, float]:
    """hidden -> 8192: one row against reading, many against multiplying."""
    rng, N = np.random.default_rng(0), 4 * HIDDEN
    one = random_matrix(rng, (N, HIDDEN), bits, dtype)
    copies = [one]
    while rows == 1 and len(copies) * nbytes(one) < FOOTPRINT:
        copies.append(Matrix(*(a * 1 if isinstance(a, mx.array) else a for a in one)))
    mx.eval([m[:3] for m in copies])
    x = rows_of(rng, rows, dtype)

    def run(i):
        mx.eval(projections(x, [copies[i]]))

    exact = np.array(x.astype(mx.float32), np.float64) @ values(one).T
    ratio = error_ratio(projections(x, [one])[0], exact)
    work, limit = (nbytes(one), "read") if rows == 1 else (2.0 * rows * N * HIDDEN, "fma")
    shape = f"{rows} x {HIDDEN} -> {N}"
    case = Case("projections", f"affine {bits}-bit", name(dtype), shape, run, len(copies), work, limit)
    return case, ratio


def experts_decode(bits: int, dtype: mx.Dtype) -> tuple[Case, float]:
    """The experts of one token; each run takes the next eight, so that none is in a cache."""
    rng = np.random.default_rng(1)
    sets = []
    while sum(nbytes(*s) for s in sets) < FOOTPRINT:
        shapes = [(EXPERTS, INNER, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, INNER)]
        sets.append(Experts(*(random_matrix(rng, s, bits, dtype) for s in shapes)))
        mx.eval([m[:3] for m in sets[-1]])
    chosen = rng.permutation(EXPERTS).reshape(-1, 1, TOP_K).astype(np.uint32)
    ids, scores = [mx.array(c) for c in chosen], mx.full((1, TOP_K), 1 / TOP_K)
    x = rows_of(rng, 1, dtype)
    mx.eval(ids, scores, x)

    def run(i):
        which, at = divmod(i, len(ids))
        mx.eval(moe_decode(x, sets[which], ids[at], scores))

    h, exact = np.array(x.astype(mx.float32), np.float64)[0], 0.0
    for e in chosen[0, 0]:
        gate, up, down = (values(Matrix(*(a[int(e)] if isinstance(a, mx.array) else a for a in m))) for m in sets[0])
        g = gate @ h
        exact = exact + down @ (g / (1 + np.exp(-g)) * (up @ h)) / TOP_K
    ratio = error_ratio(moe_decode(x, sets[0], ids[0], scores)[0], exact)
    work = nbytes(*sets[0]) * TOP_K / EXPERTS
    shape = f"1 x {HIDDEN} -> {INNER} -> {HIDDEN}, {TOP_K} of {EXPERTS}"
    case = Case("moe_decode", f"affine {bits}-bit", name(dtype), shape, run, len(sets) * len(ids), work, "read")
    return case, ratio


def experts_prefill(bits: int, dtype: mx.Dtype) -> tuple[Case, float]:
    rng = np.random.default_rng(2)
    m = random_matrix(rng, (EXPERTS, INNER, HIDDEN), bits, dtype)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(ROWS)]).astype(np.uint32)
    plan = route_plan(mx.array(ids), EXPERTS)
    x = rows_of(rng, ROWS, dtype)
    sorted_rows = x[plan.order // TOP_K]
    mx.eval(m[:3], plan[:5], sorted_rows)

    def run(_):
        mx.eval(grouped_qmm(sorted_rows, [m], plan))

    some = np.arange(0, ROWS * TOP_K, 97)
    h = np.array(sorted_rows.astype(mx.float32), np.float64)[some]
    weights = (values(Matrix(*(a[int(e)] if isinstance(a, mx.array) else a for a in m))) for e in np.array(plan.experts)[some])
    exact = np.stack([w @ row for w, row in zip(weights, h)])
    ratio = error_ratio(grouped_qmm(sorted_rows, [m], plan)[mx.array(some)], exact)
    work = 2.0 * ROWS * TOP_K * INNER * HIDDEN
    shape = f"{ROWS} x {TOP_K} rows of {EXPERTS}, {HIDDEN} -> {INNER}"
    return Case("grouped_qmm", f"affine {bits}-bit", name(dtype), shape, run, 1, work, "fma"), ratio


def name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


#: One maker a case: (case, error_ratio); made when it is measured and dropped after.
MATRIX_CASES: tuple[Callable[[], tuple[Case, Optional[float]]], ...] = (
    lambda: dense(1, 4, mx.bfloat16),
    lambda: dense(1, 4, mx.float32),
    lambda: dense(1, 8, mx.bfloat16),
    lambda: experts_decode(4, mx.bfloat16),
    lambda: experts_decode(4, mx.float32),
    lambda: dense(ROWS, 4, mx.bfloat16),
    lambda: dense(ROWS, 4, mx.float32),
    lambda: experts_prefill(4, mx.bfloat16),
)


def cases() -> Iterator[Callable[[], tuple[Case, Optional[float]]]]:
    yield from MATRIX_CASES
    for make in ops_sequence.CASES:
        yield lambda make=make: (make(), None)


def measure(case: Case, threads: int, footprint: mx.array, rounds: int = 5) -> dict:
    """Medians of alternating runs of the op and of its limit."""
    ext = extension.load()
    ext.set_threads(threads)
    # The limit is that of the best way to read: what the machine gives, not what one loop gets.
    ahead = max((0, 1024, 4096), key=lambda a: ext.read_bandwidth(footprint, a))
    each = max(1, min(case.count, 64))
    at, times, limits = 0, [], []
    case.run(0)
    for _ in range(rounds):
        limits.append(
            ext.fma_peak() if case.limit == "fma" else ext.read_bandwidth(footprint, ahead)
        )
        start = time.perf_counter()
        for _ in range(each):
            case.run(at % case.count)
            at += 1
        times.append((time.perf_counter() - start) / each)
    seconds, limit = statistics.median(times), statistics.median(limits)
    return {
        "op": case.op, "format": case.format, "dtype": case.dtype, "shape": case.shape,
        "threads": threads, "time": seconds, "rate": case.work / seconds,
        "limit": limit, "limited_by": case.limit, "share": case.work / seconds / limit,
    }  # fmt: skip


def target(row: dict) -> Optional[float]:
    pair = TARGETS.get((row["op"], row["limited_by"], row["dtype"]))
    return pair and pair[0 if row["threads"] == 1 else 1]


def run(threads: tuple[int, ...], progress: Callable[[str], None]) -> dict:
    """The whole report."""
    ext = extension.load()
    before, start = ext.threads(), time.perf_counter()
    footprint = mx.ones((FOOTPRINT // 4,))
    mx.eval(footprint)
    ops = []
    try:
        for make in cases():
            case, ratio = make()
            progress(f"{case.op} {case.format} {case.dtype}: {case.shape}")
            for n in threads:
                row = measure(case, n, footprint)
                ops.append({**row, "error_ratio": ratio, "target": target(row)})
            del case
    finally:
        ext.set_threads(before)
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "isa": ext.isa()},
        "mlx": mx.__version__,
        "seconds": time.perf_counter() - start,
        "ops": ops,
    }


def table(report: dict):
    from rich.table import Table

    columns = ("op", "format", "dtype", "shape", "threads", "time", "rate", "limit", "share", "error")
    t = Table(*columns, title=f"CPU ops, {report['machine']['isa']}")
    for row in report["ops"]:
        unit = "GB/s" if row["limited_by"] == "read" else "GFLOP/s"
        aim, error = row["target"], row["error_ratio"]
        share = f"{row['share']:.0%}" + (f" (target {aim:.0%})" if aim else "")
        t.add_row(
            row["op"], row["format"], row["dtype"], row["shape"], str(row["threads"]),
            f"{row['time'] * 1e3:.3f} ms", f"{row['rate'] / 1e9:.1f} {unit}", f"{row['limit'] / 1e9:.1f}",
            share, "" if error is None else f"{error:.3g}",
        )  # fmt: skip
    return t


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qwen_metal.evidence.ops", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    options = parser.parse_args(arguments)
    if extension.load() is None:
        print(f"qwen-metal: no CPU kernels here: {extension.status().reason}", file=sys.stderr)
        return 2
    mx.set_default_device(mx.cpu)
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    most = extension.load().threads()
    with console.status("measuring") as status:
        report = run((1, 2) if most > 1 else (1,), lambda text: status.update(text))
    console.print(table(report))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
