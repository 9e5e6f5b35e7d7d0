"""Stand-in for mx.fast.metal_kernel on machines without Metal.

`generate` writes the text that MLX writes (tests/msl_host/test_metal_kernel.py compares the two),
and calling a kernel runs that text on the CPU. `metal_on_cpu` puts the stand-in in MLX's place,
so that a module's own Python dispatch runs unchanged.
"""

import contextlib
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from .run import Kernel, Uninitialised, to_bfloat

# MLX's name, Metal's name, and how numpy holds the bits.
_DTYPES = {
    mx.bool_: ("bool", np.bool_),
    mx.uint8: ("uint8_t", np.uint8),
    mx.uint16: ("uint16_t", np.uint16),
    mx.uint32: ("uint32_t", np.uint32),
    mx.uint64: ("uint64_t", np.uint64),
    mx.int8: ("int8_t", np.int8),
    mx.int16: ("int16_t", np.int16),
    mx.int32: ("int32_t", np.int32),
    mx.int64: ("int64_t", np.int64),
    mx.float16: ("float16_t", np.float16),
    mx.bfloat16: ("bfloat16_t", np.uint16),
    mx.float32: ("float", np.float32),
    mx.complex64: ("complex64_t", np.complex64),
}
# Below this many elements MLX passes an input in constant memory.
_SMALL = 8
# In the order in which MLX appends them, with their types.
_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
# MLX puts its utilities in front of every kernel when it compiles it.
_UTILITIES = '#include "mlx/backend/metal/kernels/utils.h"\n'


@dataclass
class Options:
    """How kernels run. checked, seed, lockstep, resident: as in run.Kernel; log: filled with (name, Result)."""

    checked: bool = False
    seed: int | None = None
    lockstep: bool = False
    resident: int = 1
    log: list = field(default_factory=list)


def mlx_headers():
    """Folder with MLX's kernel headers, as the installed wheel carries them."""
    for folder in importlib.util.find_spec("mlx").submodule_search_locations:
        include = Path(folder) / "include"
        if (include / "mlx/backend/metal/kernels/utils.h").exists():
            return include
    raise FileNotFoundError("the installed mlx carries no Metal kernel headers")


def _is_row_contiguous(array):
    expected = array.itemsize
    for size, stride in zip(array.shape[::-1], memoryview(_bits(array)).strides[::-1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _bits(array):
    """The array in a type that numpy can look at, with the same strides."""
    array = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(array)
    return array


@dataclass(frozen=True)
class _Input:
    """One input as the kernel sees it. strides: in elements."""

    values: np.ndarray
    dtype: mx.Dtype
    shape: tuple
    strides: tuple

    @property
    def size(self):
        return int(np.prod(self.shape, dtype=np.int64))


def _as_input(value, ensure_row_contiguous):
    if isinstance(value, bool):
        value = mx.array(value)
    elif isinstance(value, int):
        value = mx.array(value, mx.int32)
    elif isinstance(value, float):
        value = mx.array(value, mx.float32)
    seen = np.asarray(_bits(value))
    if ensure_row_contiguous or _is_row_contiguous(value):
        seen = np.ascontiguousarray(seen).reshape(value.shape)
        strides = tuple(int(np.prod(value.shape[i + 1 :], dtype=np.int64)) for i in range(value.ndim))
        return _Input(seen, value.dtype, value.shape, strides)
    strides = tuple(s // seen.itemsize for s in seen.strides)
    if min(strides, default=0) < 0:
        raise ValueError("the stand-in passes no arrays with negative strides")
    reach = 1 + sum((size - 1) * stride for size, stride in zip(seen.shape, strides))
    span = np.lib.stride_tricks.as_strided(seen, (reach,), (seen.itemsize,))
    return _Input(np.array(span), value.dtype, value.shape, strides)


def _template_value(value):
    if isinstance(value, mx.Dtype):
        return _DTYPES[value][0]
    return str(int(value))


def _template_kind(value):
    return "typename" if isinstance(value, mx.Dtype) else "bool" if isinstance(value, bool) else "int"


def _suffix(value):
    return _DTYPES[value.dtype][0] + ("" if value.shape else "s") + ("c" if value.shape and value.size < _SMALL else "")


def _kernel_name(name, template, inputs, output_dtypes):
    parts = "_".join(_template_value(v) for _, v in template).replace("-", "_")
    words = [f"custom_kernel_{name}", *(["_" + parts] if template else [])]
    return "_".join([*words, *map(_suffix, inputs), *(_DTYPES[d][0] for d in output_dtypes)])


def _input_declarations(name, value, body, first):
    """Declarations of one input and of the parts of its layout that the body names."""
    space = "constant" if value.size < _SMALL else "device"
    yield f"const {space} {_DTYPES[value.dtype][0]}{'*' if value.shape else '&'} {name} [[buffer({first})]]"
    if not value.shape:
        return
    for part, kind in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
        if f"{name}_{part}" in body:
            first += 1
            yield f"const constant {kind} {name}_{part} [[buffer({first})]]"


@dataclass(frozen=True)
class Generated:
    """text: what MLX prints and compiles; name: the function in it."""

    text: str
    name: str


def generate(name, input_names, output_names, body, header, inputs, output_dtypes, template, atomic_outputs):
    """The Metal text that MLX generates for one call; `inputs` are _Input."""
    declarations = []
    for input_name, value in zip(input_names, inputs):
        declarations += _input_declarations(input_name, value, body, len(declarations))
    for output_name, dtype in zip(output_names, output_dtypes):
        kind = _DTYPES[dtype][0]
        kind = f"atomic<{kind}>" if atomic_outputs else kind
        declarations.append(f"device {kind}* {output_name} [[buffer({len(declarations)})]]")
    declarations += [f"{kind} {a} [[{a}]]" for a, kind in _ATTRIBUTES.items() if a in body]
    full = _kernel_name(name, template, inputs, output_dtypes)
    text = header
    if template:
        text += f"template <{', '.join(f'{_template_kind(v)} {n}' for n, v in template)}>\n"
    text += f"[[kernel]] void {full}(\n  " + ",\n  ".join(declarations) + ") {\n" + body + "\n}\n"
    if template:
        instance = f"{full}<{', '.join(_template_value(v) for _, v in template)}>"
        text += f'\ntemplate [[host_name("{full}")]] [[kernel]] decltype({instance}) {instance};\n'
    return Generated(text, full)


@lru_cache(maxsize=256)
def _kernel(text, name, checked):
    return Kernel(_UTILITIES + '#line 1 "metal_kernel"\n' + text, name, checked=checked, includes=(mlx_headers(),))


def _from_bits(values, dtype):
    array = mx.array(values)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


def _output(shape, dtype, init_value):
    bits = _DTYPES[dtype][1]
    if init_value is None:
        return Uninitialised(tuple(shape), bits)
    value = to_bfloat(np.float32(init_value)) if dtype == mx.bfloat16 else init_value
    return np.full(shape, value, bits)


class MetalKernel:
    """What the stand-in for mx.fast.metal_kernel returns; called like MLX's."""

    def __init__(self, options, name, input_names, output_names, source, header="", ensure_row_contiguous=True,
                 atomic_outputs=False, compile_options=None):  # fmt: skip
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        self._options, self._name, self._source, self._header = options, name, source, header
        self._input_names, self._output_names = list(input_names), list(output_names)
        self._row_contiguous, self._atomic = ensure_row_contiguous, atomic_outputs
        self.compile_options = compile_options or {}

    def __call__(self, *, inputs, output_shapes, output_dtypes, grid, threadgroup, template=None, init_value=None,
                 verbose=False, stream=None):  # fmt: skip
        del stream
        self._check_counts(inputs, output_shapes, output_dtypes)
        values = [_as_input(v, self._row_contiguous) for v in inputs]
        generated = self.generate(values, output_dtypes, template or [])
        if verbose:
            print(f"Generated source code for `{self._name}`:\n```\n{generated.text}\n```")
        kernel = _kernel(generated.text, generated.name, self._options.checked)
        args = self._arguments(kernel, values, output_shapes, output_dtypes, init_value)
        # MLX clamps the threadgroup to the grid.
        threadgroup = tuple(min(t, g) for t, g in zip(threadgroup, grid))
        how = dict(seed=self._options.seed, lockstep=self._options.lockstep, resident=self._options.resident)
        result = kernel.run(args, grid, threadgroup, **how)
        self._options.log.append((self._name, result))
        return [_from_bits(result[n], d) for n, d in zip(self._output_names, output_dtypes)]

    def generate(self, inputs, output_dtypes, template=()):
        """The Metal text of a call with these inputs; nothing is compiled."""
        values = [v if isinstance(v, _Input) else _as_input(v, self._row_contiguous) for v in inputs]
        return generate(self._name, self._input_names, self._output_names, self._source, self._header, values,
                        output_dtypes, template, self._atomic)  # fmt: skip

    def _check_counts(self, inputs, output_shapes, output_dtypes):
        counts = (
            ("inputs", self._input_names, inputs),
            ("output_shapes", self._output_names, output_shapes),
            ("output_dtypes", self._output_names, output_dtypes),
        )
        for what, names, given in counts:
            if len(names) != len(given):
                expected = f"Expected `{what}` to have size {len(names)}"
                raise ValueError(f"[metal_kernel] {expected} but got size {len(given)}.")

    def _arguments(self, kernel, values, output_shapes, output_dtypes, init_value):
        args = {}
        for name, value in zip(self._input_names, values):
            args[name] = value.values
            args[name + "_shape"] = np.array(value.shape, np.int32)
            args[name + "_strides"] = np.array(value.strides, np.int64)
            args[name + "_ndim"] = np.int32(len(value.shape))
        for name, shape, dtype in zip(self._output_names, output_shapes, output_dtypes):
            args[name] = _output(shape, dtype, init_value)
        buffers = {p.name for p in kernel.parameters if p.kind == "buffer"}
        return {name: value for name, value in args.items() if name in buffers}


@contextlib.contextmanager
def metal_on_cpu(**options):
    """Inside, mx.fast.metal_kernel makes kernels that run here, and a GPU counts as the default device.

    options: fields of Options; yields the Options, whose log grows with every launch. Kernels made
    inside keep working afterwards.
    """
    chosen = Options(**options)
    kept = mx.fast.metal_kernel, mx.metal.is_available, mx.default_device

    def metal_kernel(*args, **kwargs):
        return MetalKernel(chosen, *args, **kwargs)

    mx.fast.metal_kernel, mx.metal.is_available = metal_kernel, lambda: True
    mx.default_device = lambda: mx.Device(mx.gpu)
    try:
        yield chosen
    finally:
        mx.fast.metal_kernel, mx.metal.is_available, mx.default_device = kept


def load_module(name):
    """A second copy of module `name`, executed now: inside metal_on_cpu its kernels are the stand-in's."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    kept = sys.modules.get(name)
    try:
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        if kept is None:
            del sys.modules[name]
        else:
            sys.modules[name] = kept
    return module


def printed_source(output):
    """The Metal text in what MLX prints with verbose=True."""
    return re.search(r"```\n(.*?)\n```", output, re.S).group(1)

