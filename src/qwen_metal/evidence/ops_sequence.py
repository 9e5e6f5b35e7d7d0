"""The ops along a sequence beside the machine's limits: rows for ``qwen_metal.evidence.ops``.

Every row alternates the op with the limit it is compared with, in the same
process and over the same number of bytes, and gives medians. Bytes of keys,
values and states rotate over more memory than the caches hold.

    python -m qwen_metal.evidence.ops_sequence
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Callable, Optional

import mlx.core as mx

from .. import extension
from ..ops.gated_delta_prepare import DeltaWeights
from ..ops.gqa_decode import QuantisedKV, gqa_decode
from ..ops.gated_delta_scan import gated_delta_scan
from ..ops.gated_delta_step import gated_delta_step

#: Bytes that a rotation covers; larger than the last-level cache of most machines.
FOOTPRINT = 600_000_000

#: Heads of the full model: key and value heads of the recurrence, query and KV heads.
HK, HV, D_DELTA = 16, 32, 128
HQ, HKV, D_ATTENTION = 16, 2, 256


@dataclass
class Case:
    """One op at one size. ``run(i)`` evaluates it on buffer i of ``count``.

    work: operations (against the FMA peak) or bytes (against read bandwidth)
    of one run.
    """

    op: str
    format: str
    dtype: str
    shape: str
    run: Callable[[int], None]
    count: int
    work: float
    limit: str


def scan_case() -> Case:
    """T = 256. Operations as the recurrence is defined: 7 an element of the state
    (decay 1, two products and an update of 2 each); the kernel needs 6."""
    T, D = 256, D_DELTA
    q, k = (mx.random.normal((1, T, HK, D)) * D**-0.5 for _ in range(2))
    v, state = mx.random.normal((1, T, HV, D)), mx.random.normal((1, HV, D, D))
    g, beta = mx.random.uniform(0.8, 1.0, (1, T, HV)), mx.random.uniform(0, 1, (1, T, HV))
    mx.eval(q, k, v, g, beta, state)

    def run(_):
        mx.eval(gated_delta_scan(q, k, v, g, beta, state))

    return Case(
        "gated_delta_scan", "-", "float32", f"T={T} Hk={HK} Hv={HV} D={D}", run, 1,
        7.0 * T * HV * D * D, "fma",
    )  # fmt: skip


def step_case() -> Case:
    """T = 1: the state read and written, the window and the inputs."""
    D, channels = D_DELTA, (2 * HK + HV) * D_DELTA
    weights = DeltaWeights(
        mx.random.normal((channels, 4, 1)).astype(mx.bfloat16),
        mx.random.normal((HV,)),
        mx.ones((HV,), mx.bfloat16),
        mx.ones((D,), mx.bfloat16),
        HK, HV, D, D, 1e-6,
    )  # fmt: skip
    size = HV * D * D * 4
    count = FOOTPRINT // size
    states = [mx.random.normal((1, HV, D, D)) for _ in range(count)]
    windows = [mx.zeros((1, 3, channels), mx.bfloat16) for _ in range(count)]
    qkv, z, gates = (
        mx.random.normal((1, 1, n)).astype(mx.bfloat16) for n in (channels, HV * D, HV)
    )
    mx.eval(states, windows, qkv, z, gates, list(weights[:4]))

    def run(i):
        y, windows[i], states[i] = gated_delta_step(
            qkv, z, gates, gates, windows[i], states[i], weights
        )
        mx.eval(y, windows[i], states[i])

    return Case(
        "gated_delta_step", "-", "bfloat16", f"T=1 Hk={HK} Hv={HV} D={D}", run, count,
        2.0 * size, "read",
    )  # fmt: skip


def decode_case(context: int, bits: Optional[int]) -> Case:
    """One token over ``context`` positions."""
    how = None if bits is None else QuantisedKV(64, bits)
    q = mx.random.normal((1, HQ, 1, D_ATTENTION)).astype(mx.bfloat16)

    def made():
        kv = [
            mx.random.normal((1, HKV, context, D_ATTENTION)).astype(mx.bfloat16) for _ in range(2)
        ]
        return kv if bits is None else [mx.quantize(t, 64, bits) for t in kv]

    first = made()
    size = sum(t.nbytes for t in (first if bits is None else (*first[0], *first[1])))
    buffers = [first] + [made() for _ in range(max(1, FOOTPRINT // size - 1))]
    mx.eval(q, buffers)

    def run(i):
        mx.eval(gqa_decode(q, *buffers[i], D_ATTENTION**-0.5, quantised=how))

    return Case(
        "gqa_decode", "float" if bits is None else f"affine {bits}-bit group 64", "bfloat16",
        f"S={context} heads={HQ}/{HKV} D={D_ATTENTION}", run, len(buffers), float(size), "read",
    )  # fmt: skip


CASES: tuple[Callable[[], Case], ...] = (
    scan_case,
    step_case,
    lambda: decode_case(4096, None),
    lambda: decode_case(4096, 8),
    lambda: decode_case(32768, None),
    lambda: decode_case(32768, 8),
)


def measure(case: Case, threads: int, rounds: int = 5) -> dict:
    """A row of the evidence: medians of alternating runs of the op and of its limit."""
    ext = extension.load()
    ext.set_threads(threads)
    footprint = mx.zeros((FOOTPRINT // 4,)) if case.limit == "read" else None
    mx.eval(footprint)
    times, limits, at = [], [], 0
    each = max(1, min(case.count, 16))
    case.run(0)
    for _ in range(rounds):
        limits.append(ext.fma_peak() if footprint is None else ext.read_bandwidth(footprint))
        start = time.perf_counter()
        for _ in range(each):
            case.run(at % case.count)
            at += 1
        times.append((time.perf_counter() - start) / each)
    seconds, limit = statistics.median(times), statistics.median(limits)
    rate = case.work / seconds
    return {
        "op": case.op, "format": case.format, "dtype": case.dtype, "shape": case.shape,
        "threads": threads, "time": seconds, "rate": rate, "limit": limit, "share": rate / limit,
    }  # fmt: skip


def rows(threads: tuple[int, ...] = (1, 2)) -> list[dict]:
    """All rows, each case built once and dropped before the next."""
    answer = []
    for make in CASES:
        case = make()
        answer += [measure(case, n) for n in threads]
    return answer


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    for row in rows():
        print(
            f"{row['op']:17} {row['format']:21} {row['shape']:28} {row['threads']} thr "
            f"{row['time'] * 1e3:8.3f} ms {row['rate'] / 1e9:7.1f} of {row['limit'] / 1e9:6.1f} G/s "
            f"{row['share']:5.0%}"
        )
