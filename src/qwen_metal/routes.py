"""Which route served each operation: counted, so that no fallback goes unheard of."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import Callable, Iterator


class Unsupported(ValueError):
    """A call no fast route serves, raised with the reason under ``strict``."""


_lock = threading.Lock()
_counts: Counter = Counter()
_reasons: Counter = Counter()
_local = threading.local()


def _counters() -> tuple[Counter, Counter]:
    """Calls and reasons to count into: this thread's own within ``separate()``."""
    return getattr(_local, "apart", None) or (_counts, _reasons)


def count_fast(op: str, route: str) -> None:
    """Count one call of ``op`` served by the fast ``route`` (``cpu``, ``metal``...)."""
    with _lock:
        _counters()[0][op, route] += 1


def count_step(route: str, calls: Counter) -> None:
    """Count one whole decode step served by ``route``, and its calls by operation."""
    with _lock:
        counts = _counters()[0]
        counts["decode_step", route] += 1
        for op, number in calls.items():
            counts[op, route] += number


def count_stock(op: str, reason: str) -> None:
    """Count one call of ``op`` served by the stock path, with the reason.

    Raises:
        Unsupported: inside ``strictly()``, naming the operation and the reason.
    """
    if getattr(_local, "strict", False):
        raise Unsupported(f"{op}: {reason}")
    with _lock:
        counts, reasons = _counters()
        counts[op, "stock"] += 1
        reasons[op, reason] += 1


@contextlib.contextmanager
def strictly(on: bool) -> Iterator[None]:
    """Within it, on this thread, a call the stock path would serve raises."""
    before = getattr(_local, "strict", False)
    _local.strict = on
    try:
        yield
    finally:
        _local.strict = before


@contextlib.contextmanager
def separate() -> Iterator[Callable[[], dict]]:
    """Count this thread's calls within it apart; gives a ``routes()`` of them."""
    before = getattr(_local, "apart", None)
    _local.apart = (Counter(), Counter())
    try:
        yield routes
    finally:
        _local.apart = before


def routes(reset: bool = False) -> dict[str, dict]:
    """Calls by operation and route since the start or the last reset.

    Args:
        reset: start counting anew after this answer.

    Returns:
        ``{op: {"cpu": calls, "stock": calls, "reasons": {reason: calls}}}``;
        a key stands only where it counted something. Counts are of calls in
        Python: inside ``mx.compile`` a call counts once a trace.
    """
    with _lock:
        counts, reasons = _counters()
        answer: dict[str, dict] = {}
        for (op, route), calls in sorted(counts.items()):
            answer.setdefault(op, {})[route] = calls
        for (op, reason), calls in sorted(reasons.items()):
            answer[op].setdefault("reasons", {})[reason] = calls
        if reset:
            counts.clear()
            reasons.clear()
    return answer


def fast_share(counts: dict[str, dict]) -> float:
    """Share (0-1) of the calls in a ``routes()`` answer that fast routes served."""
    calls = [(r, n) for v in counts.values() for r, n in v.items() if r != "reasons"]
    total = sum(n for _, n in calls)
    return sum(n for r, n in calls if r != "stock") / total if total else 0.0
