"""Where this package keeps files between runs: ``QWEN_METAL_CACHE``, or the user's cache folder."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_path() -> Path:
    """The folder, whether or not it exists."""
    if chosen := os.environ.get("QWEN_METAL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path("~/Library/Caches/qwen-metal").expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "qwen-metal"


def cache_dir() -> Path:
    """The folder, made if need be and known to take files.

    Raises:
        OSError: it cannot be made or written; the message is one line.
    """
    path = cache_path()
    try:
        path.mkdir(parents=True, exist_ok=True)
        # A file is the only sure test: permission bits say nothing to root or on a full disk.
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(
            f"the cache folder {path} cannot be written ({why}); "
            "set QWEN_METAL_CACHE to a folder that can"
        ) from None
    return path
