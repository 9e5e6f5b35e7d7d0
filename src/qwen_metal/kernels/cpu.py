"""The compiled CPU kernels, called through the optional extension."""

from __future__ import annotations

from typing import Optional

import mlx.core as mx

from .. import extension
from ..policy import Policy


def missing(op: str, policy: Policy) -> Optional[str]:
    """None when the extension has a CPU kernel of ``op``, or why it cannot serve."""
    if policy.kernels == "stock":
        return "policy: kernels='stock'"
    if policy.numerics == "match":
        return "policy: numerics='match' rounds wherever mlx-lm rounds, as the stock path does"
    module = extension.load()
    if module is None:
        return extension.status().reason
    if mx.default_device() != mx.cpu:
        return "the default device is a GPU and this version has CPU kernels only"
    if not hasattr(module, op):
        return f"no CPU kernel of {op} in this version"
    return None
