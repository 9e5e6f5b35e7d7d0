"""qwen-metal: Qwen's hybrid MoE models through MLX, on fused kernels.

>>> import qwen_metal
>>> model, tokenizer = qwen_metal.load("path/to/checkpoint")

Nothing is computed at import: no arrays, streams or compiled functions.
"""

from .loader import accelerate, is_accelerated, load, restore, warmup
from .policy import Policy
from .routes import Unsupported, routes

__version__ = "0.1.0"

__all__ = [
    "Policy",
    "Unsupported",
    "accelerate",
    "is_accelerated",
    "load",
    "restore",
    "routes",
    "warmup",
]
