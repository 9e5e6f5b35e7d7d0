"""What the evidence commands share: where they run, how errors are computed, how results are kept."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

import mlx.core as mx
import numpy as np

from ..commands.common import UserError
from ..loader import backend
from ..commands.output import say, write_json

#: Bytes that must be free where a result is to be written.
ROOM = 1 << 20

BACKENDS = ("cpu", "metal", "cuda", "host")


# -- where it runs ------------------------------------------------------------------------------


def choose_backend(name: Optional[str]) -> str:
    """Make ``name`` MLX's default device; None keeps the one there is.

    Returns:
        The backend: ``cpu``, ``metal``, ``cuda`` or ``host`` (Metal kernels
        executed on a CPU).

    Raises:
        UserError: a device or a checkout that is not there.
    """
    if name is None:
        return backend()
    there = {
        "cpu": True,
        "metal": mx.metal.is_available(),
        "cuda": mx.cuda.is_available(),
        "host": host_folder() is not None,
    }
    if not there[name]:
        raise UserError(f"--backend {name}: {_ABSENT[name]}")
    mx.set_default_device(mx.gpu if name in ("metal", "cuda") else mx.cpu)
    return name


_ABSENT = {
    "metal": "this machine has no Metal device that MLX can use; --backend cpu runs everywhere",
    "cuda": "this machine has no CUDA device that MLX can use; --backend cpu runs everywhere",
    "host": "only a checkout of the repository can run it (it needs tests/msl_host); "
    "--backend cpu runs everywhere",
}


def host_folder() -> Optional[Path]:
    """The checkout's executor of Metal kernels, or None in an installed package."""
    folder = Path(__file__).resolve().parents[3] / "tests" / "msl_host"
    return folder if folder.is_dir() else None


@contextlib.contextmanager
def on_device(device: Optional[mx.Device]) -> Iterator[None]:
    """Within it ``device`` is MLX's default; None changes nothing."""
    before = mx.default_device()
    if device is not None:
        mx.set_default_device(device)
    try:
        yield
    finally:
        mx.set_default_device(before)


def route_of(counts: dict[str, dict], op: str) -> str:
    """Which route served ``op`` in a ``routes()`` answer, with the reason for stock."""
    row = counts.get(op, {})
    names = [name for name in row if name != "reasons"]
    reasons = "; ".join(row.get("reasons", {}))
    return ", ".join(names) + (f" ({reasons})" if reasons else "")


# -- errors -------------------------------------------------------------------------------------


def float64(x: mx.array) -> np.ndarray:
    """An MLX array as numpy float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def rms(x: np.ndarray, axis: Optional[int] = None) -> Any:
    """Root mean square."""
    return np.sqrt(np.mean(np.square(x), axis=axis))


def rounded(x: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Float64 values rounded to ``dtype`` and back."""
    return float64(mx.array(x.astype(np.float32)).astype(dtype))


def errors(got: np.ndarray, want: np.ndarray, floor_dtype: mx.Dtype, bad: float = 10.0) -> dict[str, Any]:
    """How far float64 ``got`` (R, N) is from the float64 reference ``want``.

    Args:
        floor_dtype: whose rounding of ``want`` is the floor.
        bad: a row whose error is over ``bad`` times its own floor is a bad row.

    Returns:
        ratio: RMS error over the floor; 1.00 is nothing lost but the rounding
            of the output. rel_rmse: RMS error over RMS of ``want``. mean_error:
            mean signed error over RMS of ``want``. bad_rows and rows: counts.
    """
    error, floor = got - want, rounded(want, floor_dtype) - want
    size = rms(want)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_row = rms(error, axis=-1) / rms(floor, axis=-1)
    return {
        "ratio": float(rms(error) / rms(floor)),
        "rel_rmse": float(rms(error) / size),
        "mean_error": float(np.mean(error) / size),
        # A NaN in a row is not below any bound, so it counts.
        "bad_rows": int(np.sum(~(by_row <= bad))),
        "rows": len(want),
    }


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays hold the same bits (a NaN equals itself)."""
    bits = {4: mx.uint32, 2: mx.uint16}[a.dtype.size]
    return a.dtype == b.dtype and mx.array_equal(a.view(bits), b.view(bits)).item()


# -- results ------------------------------------------------------------------------------------


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of a command's result."""
    return json.loads(resources.files(__package__).joinpath("schemas", f"{name}.json").read_text())


def check_result(name: str, value: Any) -> None:
    """Raise a ValueError, in one line, unless ``value`` is a result of command ``name``."""
    import jsonschema

    try:
        jsonschema.validate(value, schema(name))
    except jsonschema.ValidationError as error:
        where = "/".join(map(str, error.absolute_path)) or "the whole"
        raise ValueError(f"no result of qwen-metal {name}: {where}: {error.message[:200]}") from None


def read_result(name: str, path: Path) -> dict[str, Any]:
    """A result file of command ``name``.

    Raises:
        UserError: no such file, no JSON, or a result of something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        check_result(name, value)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8, so no result of qwen-metal {name}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return value


def check_room(*paths: Optional[Path]) -> None:
    """Raise a UserError unless every file can take a result, before any long work."""
    for path in filter(None, paths):
        try:
            _try_room(path)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def _try_room(path: Path) -> None:
    if path.exists() and not path.is_file():
        # A device or a pipe: nothing is written yet, but /dev/full answers even so.
        handle = os.open(path, os.O_WRONLY)
        try:
            os.write(handle, b"")
        finally:
            os.close(handle)
        return
    # The bytes are written: free space as the system reports it knows no quota.
    with tempfile.TemporaryFile(dir=path.parent) as stream:
        stream.write(b"\0" * ROOM)
        stream.flush()
        os.fsync(stream.fileno())


def keep(command: str, value: dict[str, Any], path: Optional[Path]) -> None:
    """Write a result as JSON where asked for."""
    if path is not None:
        check_result(command, value)
        with writing(path):
            write_json(path, value)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A disk that filled up since ``check_room`` is one line, not a traceback."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first aligned to the right."""
    rule = ["---"] + ["---:"] * (len(headers) - 1)
    lines = [headers, rule, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def show(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """A table on a terminal; the same as Markdown where stdout is something else."""
    if not sys.stdout.isatty():
        print(f"\n**{title}**\n\n{markdown(headers, rows)}", flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)


class Progress:
    """Work done of ``total`` on stderr: a bar with time left on a terminal, else some lines."""

    #: Seconds between two lines where stderr is no terminal.
    EVERY = 15.0

    def __init__(self, total: int):
        self.total, self.done, self.bar = total, 0, None
        self.start = self.said = time.monotonic()

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def at(self, text: str) -> None:
        """What is being worked on now."""
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        elif (now := time.monotonic()) - self.said >= self.EVERY:
            self.said = now
            spent = now - self.start
            left = f", about {spent / self.done * (self.total - self.done):.0f} s left" if self.done else ""
            say(f"{self.done} of {self.total} after {spent:.0f} s{left}: {text}")

    def step(self) -> None:
        """One piece of work is done."""
        self.done += 1
        if self.bar is not None:
            self.bar.advance(self.task)

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextlib.contextmanager
def interruptible(note: Callable[[], str]) -> Iterator[list[bool]]:
    """Ctrl-C ends the block and is remembered: what is done so far is kept.

    Args:
        note: what to say then, in one line.

    Yields:
        A list that holds True once the block was interrupted.
    """
    stopped: list[bool] = []
    try:
        yield stopped
    except KeyboardInterrupt:
        stopped.append(True)
        say(f"interrupted: {note()}")
