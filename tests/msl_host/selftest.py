"""`make msl-selftest`: proves the host executor on kernels that others wrote, and prints the table.

Writes build/msl-selftest.json; exits with 1 where a row falls short, 2 without a compiler.
"""

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

from . import build as building
from .upstream import headers
from .upstream.rows import measure


def _line(row):
    state = "ok" if row.ok else "SHORT"
    if row.low is None and row.high is None:
        state = ""
    return f"{row.group:<22} {row.name:<42} {row.measured:>10.4g}  {row.expected:<18} {state:<5} {row.note}".rstrip()


def _print_environment():
    for compiler in building.available_compilers():
        print(f"compiler: {compiler.name}")
    print(f"kernels from mlx {version('mlx')} and mlx-lm {version('mlx-lm')}, as installed")
    if not headers.old():
        print("*" * 100)
        print(f"*** mlx {headers.OLD_VERSION} could not be fetched (no package index?): its rows are LEFT OUT")
        print("*" * 100)


def _summary(rows, seconds):
    failed = sum(not row.ok for row in rows)
    worst = max(rows, key=lambda row: (not row.ok, row.strain))
    return {
        "total": len(rows),
        "failed": failed,
        "worst": f"{worst.group}: {worst.name}: {worst.measured:.4g} ({worst.expected})",
        "seconds": round(seconds, 1),
        "old_version_tested": headers.old() is not None,
        "rows": [row.as_json() for row in rows],
    }


def main(arguments=None):
    """Run the self-test; returns the exit status."""
    parser = argparse.ArgumentParser(prog="msl-selftest", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("build/msl-selftest.json"), metavar="FILE")
    path = parser.parse_args(arguments).json
    started = time.perf_counter()
    try:
        building.find_compiler()
    except building.CompilerMissing as error:
        print(f"msl-selftest: {error}")
        return 2
    _print_environment()
    rows = []
    for row in measure():
        rows.append(row)
        print(_line(row), flush=True)
    summary = _summary(rows, time.perf_counter() - started)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    passed = summary["total"] - summary["failed"]
    print(f"msl-selftest: {passed} of {summary['total']} rows as they should be, {summary['failed']} short, "
          f"{summary['seconds']:.0f} s; closest to its limit: {summary['worst']}")  # fmt: skip
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
