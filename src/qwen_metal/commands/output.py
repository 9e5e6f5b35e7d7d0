"""How commands speak: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..routes import fast_share


def say(text: str) -> None:
    """One line on stderr, marked as ours."""
    print(f"qwen-metal: {text}", file=sys.stderr, flush=True)


def one_line(error: object) -> str:
    """An error's text on a single line."""
    return " ".join(str(error).split()) or type(error).__name__


def gigabytes(count: float) -> str:
    """A byte count for people."""
    return f"{count / 1e9:.2f} GB" if count < 1e10 else f"{count / 1e9:.1f} GB"


def routes_line(counts: dict[str, dict]) -> str:
    """A ``routes()`` answer in one line: which operations ran where."""
    by_route: dict[str, list[str]] = {}
    calls = 0
    for op, row in counts.items():
        for route, count in row.items():
            if route != "reasons":
                by_route.setdefault(route, []).append(op)
                calls += count
    if not calls:
        return "routes: nothing ran"
    parts = [
        f"{route}: {', '.join(ops)}"
        for route, ops in sorted(by_route.items(), key=lambda item: item[0] == "stock")
    ]
    return f"routes: {fast_share(counts):.0%} of {calls:,} calls fast; " + "; ".join(parts)


def routes_lines(counts: dict[str, dict]) -> list[str]:
    """A ``routes()`` answer, one line an operation, with the reasons for stock."""
    lines = []
    for op, row in counts.items():
        ran = ", ".join(f"{route} {n:,}" for route, n in row.items() if route != "reasons")
        why = "; ".join(row.get("reasons", {}))
        lines.append(f"{op}: {ran}" + (f" ({why})" if why else ""))
    return lines


def check_writable(path: Path) -> None:
    """Raise an OSError, in one line, unless a file can be written at ``path``."""
    if path.is_dir():
        raise OSError(f"{path} is a folder")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise OSError(f"{path} cannot be written")
        return
    try:
        # A file is the only sure test: permission bits say nothing to root.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written: {path.parent}: {error.strerror}") from None


def write_json(path: Path, value: Any) -> None:
    """Write the whole file or, on any failure, leave what was there."""
    text = json.dumps(value, indent=1) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout and the like
        path.write_text(text)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
