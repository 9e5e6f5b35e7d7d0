"""What ``accelerate`` leaves on a module, and the checks every block makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ..ops.matrix import Norm
from ..policy import Policy
from ..routes import Unsupported

#: Stands for "read masks and lengths from the cache": no mask array was built.
FROM_CACHE: Any = object()

ATTRIBUTE = "_qwen_metal"


@dataclass(frozen=True)
class State:
    """Settings of an accelerated model, one object shared by its modules."""

    policy: Policy
    strict: bool


def is_fused(module: Any) -> bool:
    """Whether ``accelerate`` gave this very module a fused forward."""
    return ATTRIBUTE in getattr(module, "__dict__", ())


def state_of(module: nn.Module) -> State:
    """The settings ``accelerate`` left on this module."""
    return getattr(module, ATTRIBUTE)


def norm_of(module: nn.Module) -> Norm:
    """Weight and epsilon of an RMSNorm; raises Unsupported for any other."""
    if type(module) is not nn.RMSNorm:
        raise Unsupported(f"a {type(module).__name__} has no fused kernel")
    return Norm(module["weight"], module.eps)


def check_plain(block: nn.Module) -> None:
    """Raise Unsupported where a block must take the stock path whatever its weights."""
    if block.training:
        raise Unsupported("training mode takes the stock path")
    if getattr(block, "sharding_group", None) is not None:
        raise Unsupported("a sharded block takes the stock path")


def stock_class(module: nn.Module) -> type:
    """The mlx-lm class whose place the module's fused class takes."""
    return type(module).__mro__[1]

