"""Kernel: build a Metal kernel and run it on the CPU, thread by thread."""

import ctypes
import math
import operator
import threading
import time
from dataclasses import dataclass

import numpy as np

from . import build as building
from .symbols import LineTable

_RANDOM, _FLUSH, _LOCKSTEP = 1, 2, 4
_MAX_FINDINGS = 64
_MAX_THREADS = 1024
_MAX_GRID = 2**32 - 1
# The checks keep a threadgroup's number in 22 bits.
_MAX_THREADGROUPS = 2**22 - 2
# The runtime holds one launch at a time.
_lock = threading.Lock()

# Findings that need not be defects; see docs/HOST_EXECUTOR.md.
BENIGN = frozenset({"same-value-write"})


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("host", ctypes.c_void_p), ("size", ctypes.c_uint64), ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32), ("initialised", ctypes.c_uint32),
        ("bytes_read", ctypes.c_uint64), ("bytes_written", ctypes.c_uint64),
        ("unique_read", ctypes.c_uint64), ("unique_written", ctypes.c_uint64),
        ("internal", ctypes.c_uint64 * 5),  # base and cells, the runtime keeps them
    ]  # fmt: skip


class _Finding(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 32), ("text", ctypes.c_char * 224), ("pc", ctypes.c_uint64),
        ("outer_pc", ctypes.c_uint64),
        ("file", ctypes.c_char * 160), ("line", ctypes.c_uint32), ("group", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32), ("simd", ctypes.c_uint32), ("lane", ctypes.c_uint32),
    ]  # fmt: skip


class _Statistics(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "switches", "simd_operations", "divergent_operations", "threadgroup_barriers", "simdgroup_barriers",
            "atomics", "threadgroup_bytes", "threadgroups",
        )
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p), ("library", ctypes.c_char_p), ("buffers", ctypes.POINTER(_Buffer)),
        ("threadgroup_sizes", ctypes.POINTER(ctypes.c_uint64)), ("buffer_count", ctypes.c_uint32),
        ("threadgroup_size_count", ctypes.c_uint32), ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3), ("options", ctypes.c_uint32), ("checked", ctypes.c_uint32),
        ("resident", ctypes.c_uint32), ("seed", ctypes.c_uint64), ("time_limit", ctypes.c_double),
        ("statistics", _Statistics), ("findings", ctypes.POINTER(_Finding)), ("finding_count", ctypes.c_uint32),
        ("aborted", ctypes.c_uint32),
    ]  # fmt: skip


@dataclass(frozen=True)
class Uninitialised:
    """An output without contents: filled with 0xFF bytes (NaN), and reading it is a finding."""

    shape: tuple
    dtype: type


@dataclass(frozen=True)
class Finding:
    """One defect. kind: see docs/HOST_EXECUTOR.md; line: 0 where it is unknown."""

    kind: str
    file: str
    line: int
    text: str
    threadgroup: tuple
    thread: int

    def __str__(self):
        who = f"threadgroup {self.threadgroup}, thread {self.thread}"
        return f"{self.file}:{self.line}: {self.kind}: {self.text} ({who})"


@dataclass(frozen=True)
class Statistics:
    """Counts of one launch.

    divergent_operations: SIMD operations and barriers that not all lanes took part in. The byte counts
    are by buffer and need a checked kernel: traffic counts every access, unique bytes count once.
    """

    simd_operations: int
    divergent_operations: int
    threadgroup_barriers: int
    simdgroup_barriers: int
    atomics: int
    threadgroups: int
    threadgroup_bytes: int
    bytes_read: dict
    bytes_written: dict
    unique_bytes_read: dict
    unique_bytes_written: dict


@dataclass(frozen=True)
class Result:
    """What one launch produced.

    outputs: a new array for each writable buffer; seconds: processor time; completed: False where the
    launch was ended early, by a defect that left nothing to go on with.
    """

    outputs: dict
    report: tuple
    statistics: Statistics
    seconds: float
    completed: bool = True

    @property
    def defects(self):
        """The report without findings that may be benign."""
        return tuple(f for f in self.report if f.kind not in BENIGN)

    def __getitem__(self, name):
        return self.outputs[name]


class Kernel:
    """A Metal kernel, built for the host.

    source: Metal text; name: kernel or host name in it; template_args: values or C++ spellings;
    function_constants: values by index or name; checked: with a check of every access (4-20 times
    slower). The other arguments are those of build.build. Raises what build.build raises.
    """

    def __init__(self, source, name, template_args=(), function_constants=None, checked=False, **options):
        self.name, self.checked = name, checked
        self._runtime = building.runtime()
        built = building.build(source, name, template_args, function_constants, checked, **options)
        self.parameters, self.compile_seconds, self._path = built.parameters, built.seconds, built.path
        self._library = ctypes.CDLL(str(built.path))
        self._lines = None

    def run(self, args, grid, threadgroup, seed=None, *, lockstep=False, resident=1, flush_denormals=False,
            threadgroup_bytes=(), time_limit=120.0):  # fmt: skip
        """Run the kernel over `grid` threads (not threadgroups) in threadgroups of `threadgroup` threads.

        args: by parameter name, an array or number (copied, never changed) or Uninitialised; a missing
        one is a null pointer. seed: None for the natural order, a number for a random schedule.
        lockstep: SIMD operations order memory inside their SIMD-group, as today's hardware does.
        resident: threadgroups that run interleaved. threadgroup_bytes: sizes of [[threadgroup(i)]]
        arguments. time_limit: processor seconds. Returns Result; raises ValueError on bad sizes.
        """
        grid, threadgroup = _three(grid, "grid"), _three(threadgroup, "threadgroup")
        if math.prod(threadgroup) > _MAX_THREADS:
            raise ValueError(f"{self.name}: threadgroup {threadgroup} has more than {_MAX_THREADS} threads")
        groups = math.prod(-(-g // t) for g, t in zip(grid, threadgroup))
        if max(grid) > _MAX_GRID or groups > _MAX_THREADGROUPS:
            raise ValueError(f"{self.name}: grid {grid} makes {groups} threadgroups; at most {_MAX_THREADGROUPS}")
        if resident < 1:
            raise ValueError(f"resident must be at least 1, not {resident}")
        arrays = self._arrays(args)
        buffers, names = self._buffers(args, arrays)
        findings = (_Finding * _MAX_FINDINGS)()
        options = (_RANDOM if seed is not None else 0) | (_LOCKSTEP if lockstep else 0)
        launch = _Launch(
            entry=ctypes.cast(self._library.msl_entry, ctypes.c_void_p), library=str(self._path).encode(),
            buffers=buffers, buffer_count=len(buffers), findings=findings, checked=self.checked,
            threadgroup_sizes=(ctypes.c_uint64 * max(1, len(threadgroup_bytes)))(*threadgroup_bytes),
            threadgroup_size_count=len(threadgroup_bytes), grid=(ctypes.c_uint32 * 3)(*grid),
            threadgroup=(ctypes.c_uint32 * 3)(*threadgroup), options=options | (_FLUSH if flush_denormals else 0),
            resident=resident, seed=seed or 0, time_limit=time_limit,
        )  # fmt: skip
        with _lock:
            started = time.thread_time()
            self._runtime.msl_run(ctypes.byref(launch))
            seconds = time.thread_time() - started
        report = _distinct(self._finding(findings[i]) for i in range(launch.finding_count))
        outputs = {p.name: arrays[p.name] for p in self.parameters if p.writable and p.name in arrays}
        statistics = _statistics(launch.statistics, buffers, names)
        return Result(outputs, report, statistics, seconds, not launch.aborted)

    def _arrays(self, args):
        known = {p.name for p in self.parameters if p.kind == "buffer"}
        if unknown := set(args) - known:
            raise ValueError(f"{self.name} has no buffers {sorted(unknown)}; it has {sorted(known)}")
        types = {p.name: p.scalar for p in self.parameters}
        return {
            name: _as_array(value, types[name], f"{self.name}: {name}") for name, value in args.items() if value is not None
        }

    def _buffers(self, args, arrays):
        used = [p for p in self.parameters if p.kind == "buffer"]
        buffers = (_Buffer * (max((p.index for p in used), default=-1) + 1))()
        names = {}
        for parameter in used:
            array = arrays.get(parameter.name)
            if array is None:
                continue
            buffer = buffers[parameter.index]
            names[parameter.name] = parameter.index
            buffer.host, buffer.size = array.ctypes.data, array.nbytes
            buffer.name, buffer.writable = parameter.name.encode(), parameter.writable
            buffer.initialised = not isinstance(args[parameter.name], Uninitialised)
        return buffers, names

    def _finding(self, raw):
        file, line = raw.file.decode(), raw.line
        for pc in (raw.pc, raw.outer_pc):
            if line or not pc:
                continue
            self._lines = self._lines or LineTable(self._path)
            # Findings hold return addresses: the call is the byte before.
            file, line = self._lines.find(pc - 1)
        return Finding(raw.kind.decode(), file or "?", line, raw.text.decode(), tuple(raw.group), raw.thread)


def _distinct(findings):
    """One finding for each kind and line: inlined code is in several places of the library."""
    first = {}
    for finding in findings:
        first.setdefault((finding.kind, finding.file, finding.line), finding)
    return tuple(first.values())


# Metal's scalar types as numpy holds them; others are not checked.
_SCALARS = {
    "bool": "bool", "char": "int8", "uchar": "uint8", "short": "int16", "ushort": "uint16", "int": "int32",
    "uint": "uint32", "long": "int64", "ulong": "uint64", "half": "float16", "bfloat": "uint16", "float": "float32",
    "float16_t": "float16", "bfloat16_t": "uint16", "atomic_int": "int32", "atomic_uint": "uint32",
    **{f"{u}int{bits}_t": f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


def _as_array(value, scalar, what):
    """A writable contiguous copy; Uninitialised becomes an array of 0xFF bytes.

    Numbers and lists take the type of the parameter; arrays must have its size of element, and no
    floats for integers or the other way round.
    """
    wanted = np.dtype(_SCALARS[scalar]) if scalar in _SCALARS else None
    if wanted is not None and not isinstance(value, (Uninitialised, np.ndarray, np.generic)):
        return np.array(value, wanted, order="C")
    found = np.dtype(value.dtype) if hasattr(value, "dtype") else np.asarray(value).dtype
    if wanted is not None and found != wanted and (
        found.itemsize != wanted.itemsize or "f" in (found.kind, wanted.kind)
    ):
        raise ValueError(f"{what} is {scalar}: pass {wanted}, not {found}")
    if isinstance(value, Uninitialised):
        array = np.empty(value.shape, value.dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array
    return np.array(value, order="C", copy=True)


def _three(sizes, what):
    sizes = tuple(operator.index(s) for s in (sizes if np.ndim(sizes) else (sizes,)))
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{what} must be one to three positive numbers, not {sizes}")
    return sizes + (1,) * (3 - len(sizes))


def _statistics(raw, buffers, names):
    by_name = {
        field: {name: getattr(buffers[i], field) for name, i in names.items()}
        for field in ("bytes_read", "bytes_written", "unique_read", "unique_written")
    }
    return Statistics(
        raw.simd_operations, raw.divergent_operations, raw.threadgroup_barriers, raw.simdgroup_barriers, raw.atomics,
        raw.threadgroups, raw.threadgroup_bytes, by_name["bytes_read"], by_name["bytes_written"],
        by_name["unique_read"], by_name["unique_written"],
    )  # fmt: skip


def to_bfloat(values):
    """float32 array -> bf16 bits as uint16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def from_bfloat(bits):
    """bf16 bits (uint16) -> float32 array."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
