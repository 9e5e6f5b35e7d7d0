"""qwen-metal: Qwen's hybrid MoE models through MLX, on fused kernels.

>>> import qwen_metal
>>> model, tokenizer = qwen_metal.load("path/to/checkpoint")

Nothing is computed at import: no arrays, streams or compiled functions. mlx-lm
itself, which takes a second or two, is imported at the first use of a name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The function takes the place of its module's name, so inside the package
# names are imported from ``.routes``, never the module itself.
from .routes import Unsupported, routes

if TYPE_CHECKING:
    from .loader import accelerate, is_accelerated, load, restore, warmup
    from .policy import Policy

__version__ = "0.1.0"

_HOME = {
    "Policy": "policy",
    "accelerate": "loader",
    "is_accelerated": "loader",
    "load": "loader",
    "restore": "loader",
    "warmup": "loader",
}

#: Subpackages a user reaches without importing them by name.
_PACKAGES = ("demo", "ops")

__all__ = [*_HOME, "Unsupported", "routes"]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PACKAGES})
