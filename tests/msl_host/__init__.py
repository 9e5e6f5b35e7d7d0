"""Runs Metal kernels on a CPU, with real threadgroups and SIMD-groups, and reports their defects.

See docs/HOST_EXECUTOR.md.
"""

from .build import CompileError, CompilerMissing, available_compilers, find_compiler
from .run import Finding, Kernel, Result, Statistics, Uninitialised, from_bfloat, to_bfloat

__all__ = [
    "CompileError", "CompilerMissing", "Finding", "Kernel", "Result", "Statistics", "Uninitialised",
    "available_compilers", "find_compiler", "from_bfloat", "to_bfloat",
]  # fmt: skip
