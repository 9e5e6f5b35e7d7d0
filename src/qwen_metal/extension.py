"""The compiled extension, or the reason why it is not used.

`load()` gives the module `qwen_metal._ext` or None; `status()` says which, and why. Both may be called from
any thread, look only once a process, and never raise: everything works without the extension.

    ext = extension.load()
    if ext is not None:
        ...

libmlx changes its C++ interface at almost every patch release, and an extension built with another nanobind
than mlx imports cleanly and then rejects every array. So the version it was built for is compared, and one
array goes through it, before anybody may call it. Nothing is made when this module is imported.
"""

import importlib
import importlib.machinery
import json
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_lock = threading.Lock()
_result: "tuple[ModuleType | None, Status] | None" = None


@dataclass(frozen=True)
class Status:
    """What load() found. `reason` is one line, empty when available."""

    available: bool
    reason: str
    mlx_version: str | None  # the mlx it was built for, where known
    path: str | None  # the file, where there is one
    build: dict  # compiler, nanobind, instruction sets; or what setup.py left behind


class _Refused(Exception):
    pass


def load() -> ModuleType | None:
    """The extension module, checked against the mlx that is running; None when it cannot be used."""
    return _get()[0]


def status() -> Status:
    return _get()[1]


def _get() -> "tuple[ModuleType | None, Status]":
    global _result
    if _result is None:
        with _lock:
            if _result is None:
                _result = _find()
    return _result


def _find() -> "tuple[ModuleType | None, Status]":
    record = _build_record()
    path = _file()
    version = record.get("mlx")

    def off(reason: str) -> "tuple[None, Status]":
        return None, Status(False, _one_line(reason), version, path and str(path), record)

    if os.environ.get("QWEN_METAL_NO_EXTENSION", "0") not in ("", "0"):
        return off("switched off by QWEN_METAL_NO_EXTENSION")
    if path is None:
        return off(_why_missing(record))
    try:
        module = _import(version)
        version = str(module.mlx_version)
        _check(module)
        info = dict(module.build_info())
    except Exception as error:  # an extension that misbehaves in any way is one that is not used
        result = off(str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}")
        _warn(f"qwen-metal: extension not used: {result[1].reason}; everything works without it")
        return result
    return module, Status(True, "", version, str(path), info)


def _build_record() -> dict:
    """What setup.py wrote when it built, or failed to build, the extension."""
    try:
        record = json.loads((Path(__file__).parent / "_build.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _file() -> Path | None:
    """The extension file this interpreter would import."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).parent / f"_ext{suffix}"
        if path.exists():
            return path
    return None


def _why_missing(record: dict) -> str:
    others = sorted(p.name for p in Path(__file__).parent.glob("_ext.*.so"))
    if others:
        return f"built for another Python ({others[0]}); reinstall qwen-metal"
    if record.get("built") is False:
        return f"not built: {record.get('reason') or 'no reason recorded'}"
    if record.get("built"):
        return f"was built, but the file is gone from {Path(__file__).parent}"
    return "not built"


def _import(built_for: str | None) -> ModuleType:
    import mlx.core as mx  # first: it brings libmlx, which the extension's own path finds only in a wheel

    try:
        return importlib.import_module("qwen_metal._ext")
    except ImportError as error:
        if built_for and built_for != mx.__version__:
            raise _Refused(f"built for mlx {built_for}, this is mlx {mx.__version__}") from None
        raise _Refused(f"cannot be loaded: {error}") from None


def _check(module: ModuleType) -> None:
    import mlx.core as mx

    if str(module.mlx_version) != mx.__version__:
        raise _Refused(f"built for mlx {module.mlx_version}, this is mlx {mx.__version__}")
    try:
        # On the CPU: no GPU, and no GPU stream of this thread, is needed to know.
        same = module.probe(mx.array([1.0, 2.0, 3.0]), stream=mx.cpu).tolist() == [1.0, 2.0, 3.0]
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise _Refused(f"does not take mlx's arrays ({type(error).__name__}: {first})") from None
    if not same:
        raise _Refused("changed an array that it had to hand back")


def _warn(message: str) -> None:
    """One line, once: a file and line number of this module would add a second."""
    try:
        warnings.warn_explicit(message, RuntimeWarning, filename="qwen_metal", lineno=0)
    except RuntimeWarning:  # warnings as errors: still not a reason to fail
        print(message, file=sys.stderr)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
