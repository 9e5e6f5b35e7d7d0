"""``qwen-metal limits``: how near the operations come to this machine's read bandwidth and matrix rate.

Each operation that streams weights stands beside the same pass with its
arithmetic removed: the same bytes of the same arrays, only read.
"""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import mlx.core as mx
import numpy as np

from .. import extension
from ..ops.attention_prefill import attention_prefill
from ..ops.gated_delta_scan import gated_delta_scan
from ..ops.gqa_decode import gqa_decode
from ..ops.grouped_qmm import grouped_qmm
from ..ops.matrix import Matrix
from ..ops.moe_decode import Experts, moe_decode
from ..ops.projections import projections
from ..ops.route_plan import route_plan
from ..routes import separate
from .bench import environment, usable_cores
from .common import Progress, interruptible, route_of
from .grid import SPREAD

#: Bytes that are read in turn, several times any last-level cache; and in one timed pass, short
#: enough that some passes are not disturbed.
STREAM, PASS = 512 << 20, 64 << 20

#: Bytes the extension's read kernel prefetches ahead; the best one counts.
AHEAD = (0, 512, 1024, 2048)

#: Shapes of Qwen3.6-35B-A3B.
HIDDEN, INNER, EXPERTS, TOP_K, QKV = 2048, 512, 256, 8, 8192
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256
KEY_HEADS, VALUE_HEADS, STATE_DIM = 16, 32, 128

#: Rows of a prefill, tokens of the scan and of the prefill's attention, cached tokens of the decode's.
ROWS, SCAN_TOKENS, PROMPT_TOKENS, CONTEXTS = 512, 256, 512, (4096, 32768)


@dataclass
class Job:
    """One operation at one size.

    kind: ``gemv``, ``gemm``, ``scan`` or ``attention``. run(i) makes the i-th
    call's outputs. bytes and operations: what it must read, and its multiply
    and add count. streams(i): the arrays that call i reads most of its bytes
    from, for the pass without arithmetic.
    """

    kind: str
    op: str
    size: str
    bytes: int
    operations: int
    run: Callable[[int], Any]
    streams: Callable[[int], Sequence[mx.array]] = field(default=lambda i: ())


# -- the machine --------------------------------------------------------------------------------


def machine_limits(seconds: float) -> dict[str, Any]:
    """Sustained read bandwidth (bytes/s) and matrix rate (operations/s), and what measured them."""
    module = extension.load()
    if mx.default_device() != mx.cpu:
        return {**_device_limits(seconds), "by": "mx.sum over 512 MiB and a bfloat16 matmul of 4,096"}
    parts = [mx.full((PASS // 4,), 1.0) for _ in range(STREAM // PASS)]
    mx.eval(parts)
    turns = itertools.cycle(parts)
    if module is None:
        views = itertools.cycle([np.asarray(part) for part in parts])
        read = _best(lambda: PASS / _timed(lambda: _numpy_read([next(views)])), seconds)
        return {"read": read, "matrix": _numpy_matrix(seconds), "by": "numpy (the extension is not there)"}
    read = max(
        _best(lambda: module.read_bandwidth(next(turns), ahead), seconds / len(AHEAD)) for ahead in AHEAD
    )
    return {"read": read, "matrix": _best(module.fma_peak, seconds), "by": "the extension's own loops"}


def _device_limits(seconds: float) -> dict[str, float]:
    """The same of a GPU, through MLX's own operations."""
    stream, square = mx.ones((STREAM // 4,), mx.float32), mx.ones((4096, 4096), mx.bfloat16)
    mx.eval(stream, square)
    read = _best(lambda: STREAM / _timed(lambda: mx.eval(mx.sum(stream))), seconds)
    matrix = _best(lambda: 2 * 4096**3 / _timed(lambda: mx.eval(square @ square)), seconds)
    return {"read": read, "matrix": matrix}


def _numpy_matrix(seconds: float) -> float:
    square = np.ones((2048, 2048), np.float32)
    return _best(lambda: 2 * 2048**3 / _timed(lambda: square @ square), seconds)


def _numpy_read(arrays: Sequence[np.ndarray]) -> None:
    """Read arrays on every core: numpy's reductions let go of the interpreter."""
    pieces = [piece for a in arrays for piece in np.array_split(a.reshape(-1), usable_cores())]
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(np.max, pieces))


def _best(rate: Callable[[], float], seconds: float) -> float:
    """The highest of the rates seen within some seconds: a limit is what was reached once."""
    best, end = rate(), time.monotonic() + seconds
    while time.monotonic() < end:
        best = max(best, rate())
    return best


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# -- the operations -----------------------------------------------------------------------------


def jobs() -> Iterator[Job]:
    """The operations, in bfloat16 and 4-bit weights of group 64; built when reached."""
    yield from _projections()
    yield from _experts()
    yield from _scan()
    yield from _attention()


def _random(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


def _packed(*shape: int) -> Matrix:
    """Random codes with scales of the size that quantised weights have."""
    code = mx.random.randint(0, 1 << 32, (*shape[:-1], shape[-1] // 8), dtype=mx.uint32)
    groups = (*shape[:-1], shape[-1] // 64)
    scales = mx.full(groups, SPREAD / 4, mx.bfloat16)
    matrix = Matrix(code, scales, -7.5 * scales, group_size=64, bits=4, mode="affine")
    mx.eval(matrix.weight, matrix.scales, matrix.biases)
    return matrix


def _weights(m: Matrix) -> list[mx.array]:
    return [m.weight, m.scales, m.biases]


def _size(m: Matrix) -> int:
    return sum(a.nbytes for a in _weights(m))


def _projections() -> Iterator[Job]:
    # As many matrices as exceed the caches, each call the next one: a decode step finds none of them there.
    count = max(2, -(-(STREAM // 2) // (QKV * HIDDEN // 2)))
    matrices = [_packed(QKV, HIDDEN) for _ in range(count)]
    size = _size(matrices[0])
    for rows, kind in ((1, "gemv"), (ROWS, "gemm")):
        x = _random(rows, HIDDEN)
        yield Job(
            kind,
            "projections",
            f"{rows} x {HIDDEN} -> {QKV}",
            size,
            2 * rows * HIDDEN * QKV,
            lambda i, x=x: projections(x, [matrices[i % count]]),
            lambda i: _weights(matrices[i % count]),
        )


def _experts() -> Iterator[Job]:
    gate, up, down = _packed(EXPERTS, INNER, HIDDEN), _packed(EXPERTS, INNER, HIDDEN), _packed(EXPERTS, HIDDEN, INNER)
    experts, one = Experts(gate, up, down), sum(map(_size, (gate, up, down))) // EXPERTS
    # Every call takes the next eight experts, so that none is still in a cache.
    turns = EXPERTS // TOP_K
    ids = [mx.array([list(range(TOP_K * t, TOP_K * (t + 1)))], mx.uint32) for t in range(turns)]
    x, scores = _random(1, HIDDEN), mx.full((1, TOP_K), 1 / TOP_K, mx.float32)

    def streams(i: int) -> list[mx.array]:
        chosen = slice(TOP_K * (i % turns), TOP_K * (i % turns + 1))
        return [a[chosen] for m in experts for a in _weights(m)]

    yield Job(
        "gemv",
        "moe_decode",
        f"1 row, top {TOP_K} of {EXPERTS}",
        TOP_K * one,
        2 * TOP_K * 3 * HIDDEN * INNER,
        lambda i: moe_decode(x, experts, ids[i % turns], scores),
        streams,
    )
    chosen = np.random.default_rng(0).random((ROWS, EXPERTS)).argsort(axis=-1)[:, :TOP_K]
    plan, many = route_plan(mx.array(chosen.astype(np.uint32)), EXPERTS), _random(ROWS, HIDDEN)
    mx.eval(plan[:5])
    yield Job(
        "gemm",
        "grouped_qmm",
        f"{ROWS} x {TOP_K} rows, gate and up",
        _size(gate) + _size(up),
        2 * ROWS * TOP_K * 2 * HIDDEN * INNER,
        lambda i: grouped_qmm(many, (gate, up), plan),
        lambda i: [*_weights(gate), *_weights(up)],
    )


def _scan() -> Iterator[Job]:
    tokens = SCAN_TOKENS
    q, k = (_random(1, tokens, KEY_HEADS, STATE_DIM) * STATE_DIM**-0.5 for _ in range(2))
    v = _random(1, tokens, VALUE_HEADS, STATE_DIM)
    g, beta = (mx.random.uniform(0.9, 1, (1, tokens, VALUE_HEADS)) for _ in range(2))
    state = mx.zeros((1, VALUE_HEADS, STATE_DIM, STATE_DIM))
    mx.eval(q, k, v, g, beta, state)
    # Decay, S k, the update and S q: 7 operations an element of the state and token.
    yield Job(
        "scan",
        "gated_delta_scan",
        f"{tokens} tokens",
        sum(a.nbytes for a in (q, k, v, g, beta)) + 2 * state.nbytes,
        7 * tokens * VALUE_HEADS * STATE_DIM**2,
        lambda i: gated_delta_scan(q, k, v, g, beta, state),
    )


def _attention() -> Iterator[Job]:
    for context in CONTEXTS:
        q, gate = _random(1, HEADS, 1, HEAD_DIM), _random(1, 1, HEADS * HEAD_DIM)
        # Several layers' caches in turn, as a decode step meets them.
        layers = [[_random(1, KV_HEADS, context, HEAD_DIM) for _ in range(2)] for _ in range(4)]
        yield Job(
            "attention",
            "gqa_decode",
            f"1 token, {context} keys",
            sum(a.nbytes for a in layers[0]),
            4 * HEADS * context * HEAD_DIM,
            lambda i, q=q, gate=gate, layers=layers: gqa_decode(
                q, *layers[i % 4], HEAD_DIM**-0.5, gate=gate
            ),
            lambda i, layers=layers: layers[i % 4],
        )
    tokens = PROMPT_TOKENS
    q = _random(1, HEADS, tokens, HEAD_DIM)
    k, v = (_random(1, KV_HEADS, tokens, HEAD_DIM) for _ in range(2))
    yield Job(
        "attention",
        "attention_prefill",
        f"{tokens} tokens, causal",
        q.nbytes + k.nbytes + v.nbytes,
        4 * HEADS * HEAD_DIM * tokens * (tokens + 1) // 2,
        lambda i: attention_prefill(q, k, v, HEAD_DIM**-0.5),
    )


# -- measuring ----------------------------------------------------------------------------------

#: Operations measured, for the progress.
JOBS = 8

#: Spread from which a row is marked: something else was running.
UNSTEADY = 0.5


def measure(backend: str, seconds: float) -> dict[str, Any]:
    """The object that ``limits --json`` writes; its form is ``schemas/limits.json``.

    Args:
        backend: where it runs; already MLX's default device.
        seconds: of measuring each operation, at least.

    Ctrl-C ends it early; what is measured by then is in the answer.
    """
    start, rows, found = time.monotonic(), [], []
    with Progress(JOBS + 2) as progress:
        with interruptible(lambda: f"{len(rows)} of {JOBS} operations are kept") as stopped:
            _find_limits(found, seconds, progress)
            for job in jobs():
                progress.at(f"{job.op}, {job.size}")
                rows.append(_measured(job, seconds))
                progress.step()
            # Once more at the end: other work on the machine may have disturbed the first.
            _find_limits(found, seconds, progress)
    limits = None
    if found:
        limits = {**found[0], **{key: max(f[key] for f in found) for key in ("read", "matrix")}}
    return {
        "command": "limits",
        "complete": not stopped,
        "seconds": round(time.monotonic() - start, 1),
        "backend": backend,
        "limits": limits,
        "operations": [_shared(row, limits) for row in rows],
        "machine": environment(),
    }


def _find_limits(found: list[dict[str, Any]], seconds: float, progress: Progress) -> None:
    progress.at("read bandwidth and matrix rate")
    found.append(machine_limits(seconds))
    progress.step()


def _measured(job: Job, seconds: float) -> dict[str, Any]:
    """One row: times, and those of the pass without arithmetic, alternating with it."""
    passes = _without_arithmetic(job)
    times, reads, end = [], [], time.monotonic() + seconds
    with separate() as counts:
        mx.eval(job.run(0))
        while len(times) < 3 or time.monotonic() < end:
            index = len(times) + 1
            times.append(_timed(lambda: mx.eval(job.run(index))))
            # The pass takes other weights of the same size: the call's own would still be in a cache.
            reads += [] if passes is None else [passes(index + 1)]
        route = route_of(counts(), job.op)
    middle, read = statistics.median(times), statistics.median(reads) if reads else None
    return {
        "kind": job.kind,
        "op": job.op,
        "size": job.size,
        "seconds": middle,
        "spread": (max(times) - min(times)) / middle,
        "runs": len(times),
        "bytes": job.bytes,
        "operations": job.operations,
        "without_arithmetic_seconds": read,
        "without_arithmetic_share": None if read is None else read / middle,
        "route": route,
    }


def _shared(row: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """The row with its rates as shares of the limits."""
    rates = row["bytes"] / row["seconds"], row["operations"] / row["seconds"]
    shares = rates[0] / limits["read"], rates[1] / limits["matrix"]
    return {
        **row,
        "bytes_per_second": rates[0],
        "operations_per_second": rates[1],
        "share_read": shares[0],
        "share_matrix": shares[1],
        "nearer": "read" if shares[0] > shares[1] else "matrix",
    }


def _without_arithmetic(job: Job) -> Optional[Callable[[int], float]]:
    """Seconds of reading what a call reads; None on a GPU, or where it streams nothing."""
    if mx.default_device() != mx.cpu or not job.streams(0):
        return None
    module = extension.load()

    def read(index: int) -> float:
        arrays = [a.view(mx.uint32) if a.dtype.size == 4 else a.view(mx.uint16) for a in job.streams(index)]
        if module is None:
            mx.eval(arrays)
            views = [np.asarray(a) for a in arrays]
            return _timed(lambda: _numpy_read(views))
        floats = [mx.flatten(a).view(mx.float32) for a in arrays]
        mx.eval(floats)
        return sum(a.nbytes / module.read_bandwidth(a, AHEAD[1]) for a in floats)

    return read


def lines(value: dict[str, Any]) -> list[list[str]]:
    """Rows of the printed table."""
    return [
        [
            row["op"],
            row["size"],
            f"{row['seconds'] * 1e3:.3f} ms",
            f"{row['spread']:.0%}" + "!" * (row["spread"] > UNSTEADY),
            f"{row['bytes_per_second'] / 1e9:.1f} GB/s",
            f"{row['share_read']:.0%}",
            f"{row['operations_per_second'] / 1e9:.1f} GFLOP/s",
            f"{row['share_matrix']:.0%}",
            "-" if row["without_arithmetic_share"] is None else f"{row['without_arithmetic_share']:.0%}",
            row["route"],
        ]
        for row in value["operations"]
    ]


HEADS_OF_TABLE = [
    "operation", "size", "median", "spread", "read", "of limit", "arithmetic", "of limit",
    "time without arithmetic", "route",
]  # fmt: skip


def draw(value: dict[str, Any], file: Path) -> None:
    """Shares of the two limits as a bar chart in a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = value["operations"]
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes, places = figure.subplots(), np.arange(len(rows))
    labels = [f"{row['op']}\n{row['size']}" for row in rows]
    bars = (("share_read", "of read bandwidth", "#1a73e8"), ("share_matrix", "of matrix rate", "#9aa0a6"))
    for number, (key, label, colour) in enumerate(bars):
        drawn = axes.bar(places + 0.4 * number - 0.2, [100 * row[key] for row in rows], 0.4, label=label, color=colour)
        axes.bar_label(drawn, fmt="%.0f", padding=2)
    axes.set_xticks(places, labels, rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("% of limit")
    axes.legend()
    limits = value["limits"]
    axes.set_title(
        f"{value['machine']['cpu']}: {limits['read'] / 1e9:.1f} GB/s, {limits['matrix'] / 1e9:.0f} GFLOP/s"
    )
    figure.savefig(file, format="png", dpi=120)
