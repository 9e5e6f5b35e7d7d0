"""Compiler, cache, and the way from Metal source to a loadable library.

The compiler is clang in C++-for-OpenCL mode: the one in the pinned `ziglang`
wheel, or Debian's clang-19. MSL_HOST_COMPILER chooses ("zig", "clang-19" or a
path); by default the wheel is taken where it is installed. Built kernels go to a
cache that several processes may share: a file appears under its final name only
when it is complete.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import vectors
from .rewrite import entry_point, find_signature, literal, rewrite

HERE = Path(__file__).parent
ZIGLANG_VERSION = "0.17.1"
MISSING = f"no compiler for Metal kernels: pip install ziglang=={ZIGLANG_VERSION}, or apt-get install clang-19"

METAL_HEADERS = (
    "array atomic common compute geometric integer limits logging math matrix numeric pack packed quadgroup "
    "relational simdgroup simdgroup_matrix stdlib tensor texture type_traits types uniform"
).split()

_PREPROCESS = ["-x", "c++", "-std=c++17", "-E", "-nostdinc", "-U__x86_64__", "-U__aarch64__", "-U__linux__"]
_LANGUAGE = [
    "-x", "clcpp", "-cl-std=CLC++2021", "-cl-no-stdinc", "-fdeclspec", "-cl-single-precision-constant",
    "-Xclang", "-cl-ext=+cl_khr_fp16,+cl_khr_fp64,+__opencl_c_fp64,+__opencl_c_generic_address_space",
    "-Xclang", "-cl-ext=+__cl_clang_function_pointers",
    # Metal rounds half and bfloat after every operation, and never fuses behind our back.
    "-ffp-contract=off", "-fno-finite-loops",
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-fPIC", "-g1", "-gdwarf-4", "-fno-stack-protector", "-Wno-everything", "-Wno-error=static-float-init",
]  # fmt: skip
_FAST = ["-O2", "-ftrivial-auto-var-init=pattern"]
# kernel-memory asks the runtime about each access (runtime/check.c); the others name lines themselves.
_CHECKED = [
    "-O1", "-fsanitize=kernel-memory,array-bounds,local-bounds,alignment,integer-divide-by-zero",
    "-fsanitize-recover=all", "-mllvm", "-msan-track-origins=0",
    # Without this, passing an uninitialised value to an inlined function lets the optimiser drop the path.
    "-Xclang", "-no-enable-noundef-analysis",
    # The runtime looks at the calls that led to a barrier.
    "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls",
    # Equal code of two branches, merged, would be one barrier, and have one line.
    "-mllvm", "-enable-tail-merge=0",
]  # fmt: skip


class CompileError(Exception):
    """The kernel does not compile; the text is the compiler's, with Metal files and lines."""


class CompilerMissing(RuntimeError):
    """Neither compiler is installed; the text says how to get one."""


@dataclass(frozen=True)
class Compiler:
    """One way to run clang. is_wheel: through the ziglang wheel, which links separately."""

    path: str
    is_wheel: bool

    def clang(self, arguments):
        """Run clang; returns its output, raises CompileError with its messages."""
        command = [self.path, *(["clang", "-target", f"{platform.machine()}-linux-gnu"] if self.is_wheel else [])]
        return _run([*command, *arguments])

    def library(self, arguments, output):
        """Compile one kernel to a shared library without any other library."""
        if not self.is_wheel:
            self.clang([*arguments, "-shared", "-nostdlib", "-o", output])
            return
        unlinked = Path(output + ".o")
        try:
            self.clang([*arguments, "-c", "-o", str(unlinked)])
            _run([self.path, "ld.lld", "-shared", str(unlinked), "-o", output])
        finally:
            unlinked.unlink(missing_ok=True)

    def host_library(self, sources, output):
        """Compile the runtime, plain C, against the C library."""
        front = [self.path, "cc", "-target", f"{platform.machine()}-linux-gnu.2.31"] if self.is_wheel else [self.path]
        flags = ["-std=gnu17", "-O2", "-g1", "-fPIC", "-shared", "-fno-sanitize=all", "-fno-stack-protector"]
        _run([*front, *flags, *map(str, sources), "-lm", "-lrt", "-o", output])

    @property
    def short_name(self):
        """"zig" or the name of the program."""
        return "zig" if self.is_wheel else Path(self.path).name

    @property
    def name(self):
        """For tables: which clang this is."""
        return ("ziglang wheel, " if self.is_wheel else "") + _version(self).split("\n")[0]


@cache
def _version(compiler):
    return compiler.clang(["--version"])


_spent = threading.local()


def _run(command):
    """Run a compiler; returns what it prints. Adds its processor seconds to _spent.seconds of this thread."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        _spent.seconds = getattr(_spent, "seconds", 0.0) + usage.ru_utime + usage.ru_stime
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise CompileError(errors.read()[-8000:] or f"{command[0]} failed with status {process.returncode}")
        return output.read()


def _wheel():
    spec = importlib.util.find_spec("ziglang")
    return Compiler(str(Path(spec.origin).parent / "zig"), True) if spec and spec.origin else None


def _debian(name="clang-19"):
    path = shutil.which(name)
    return Compiler(path, False) if path else None


def available_compilers():
    """Every compiler found on this machine; may be empty."""
    return [c for c in (_wheel(), _debian()) if c]


def find_compiler():
    """The compiler to use. Raises CompilerMissing with one line that says what to install."""
    wanted = os.environ.get("MSL_HOST_COMPILER", "")
    if wanted == "zig":
        found = _wheel()
    elif wanted:
        found = _debian(wanted)
    else:
        found = next(iter(available_compilers()), None)
    if not found:
        raise CompilerMissing(f"MSL_HOST_COMPILER={wanted}: not found" if wanted else MISSING)
    return found


def cache_folder():
    """Folder of built kernels and fetched headers; MSL_HOST_CACHE moves it."""
    base = os.environ.get("MSL_HOST_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "qwen-metal", "msl_host"
    )
    Path(base).mkdir(parents=True, exist_ok=True)
    return Path(base)


def _digest(*parts):
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def publish(path, write, reuse=True):
    """Create `path` through `write(temporary path)` unless it exists; safe with parallel processes."""
    if reuse and path.exists():
        return path
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


@cache
def _shim():
    """(folder, digest) of the shim: the headers here, the generated vectors, and empty Metal headers."""
    headers = {p.name: p.read_text() for p in sorted((HERE / "shim").glob("*.h"))}
    headers["msl_vectors.h"] = vectors.header()
    digest = _digest(*headers.items())
    folder = cache_folder() / f"shim-{digest}"
    (folder / "empty" / "MetalPerformancePrimitives").mkdir(parents=True, exist_ok=True)
    for name, text in headers.items():
        publish(folder / name, lambda path, text=text: Path(path).write_text(text))
    for name in METAL_HEADERS:
        publish(folder / "empty" / f"metal_{name}", lambda path: None)
    publish(folder / "empty" / "MetalPerformancePrimitives" / "MetalPerformancePrimitives.h", lambda path: None)
    return folder, digest


@cache
def machine_flags():
    """Instruction sets to compile kernels for. Conversions and fma are exact with and without."""
    if platform.machine() != "x86_64" or os.environ.get("MSL_HOST_BASELINE"):
        return ()
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n")[0].split()
    return ("-march=x86-64-v3",) if {"avx2", "f16c", "fma", "bmi2"} <= set(flags) else ()


@dataclass(frozen=True)
class Built:
    """One built kernel. seconds: processor time of the compiler, 0.0 if it came from the cache."""

    path: Path
    parameters: list
    seconds: float


def build(source, name, template_args=(), function_constants=None, checked=False, includes=(), defines=(),
          metal_version=310, compiler=None, reuse=True):  # fmt: skip
    """Build kernel `name` of Metal `source`.

    template_args: values or C++ spellings; function_constants: values by index or name; includes:
    folders; defines: "NAME=VALUE"; metal_version: 310 for Metal 3.1, 400 for Metal 4; reuse: take
    it from the cache if it is there.
    Raises CompileError with Metal lines, KeyError if there is no such kernel, CompilerMissing.
    """
    compiler = compiler or find_compiler()
    if checked and platform.machine() != "x86_64":
        raise CompilerMissing("checked kernels need x86-64: clang instruments memory (kernel-memory) there only")
    flags = [*_LANGUAGE, *(_CHECKED if checked else _FAST), *machine_flags()]
    folder, shim_digest = _shim()
    version = _version(compiler)
    _spent.seconds = 0.0
    text = _preprocess(compiler, source, includes, defines, metal_version)
    rewritten = rewrite(text, function_constants or {})
    full_name = rewritten.host_names.get(name, name)
    parameters = find_signature(text, full_name.split("<")[0].split("::")[-1].strip())
    if template_args:
        full_name += f"<{', '.join(map(literal, template_args))}>"
    code = '#include "msl.h"\nusing namespace metal;\n' + rewritten.text + entry_point(full_name, parameters)
    path = cache_folder() / f"kernel-{_digest(code, flags, shim_digest, version)}.so"
    if reuse and path.exists():
        return Built(path, parameters, 0.0)
    text_path = publish(path.with_suffix(".cl"), lambda p: Path(p).write_text(code))
    publish(path, lambda p: compiler.library([*flags, "-I", str(folder), str(text_path)], p), reuse)
    return Built(path, parameters, _spent.seconds)


def _preprocess(compiler, source, includes, defines, metal_version):
    folder, _ = _shim()
    marked = source if source.startswith("#line") else '#line 1 "kernel.metal"\n' + source
    path = cache_folder() / f"source-{_digest(marked)}.metal"
    publish(path, lambda p: Path(p).write_text(marked))
    macros = [f"-D__METAL_VERSION__={metal_version}", "-D__METAL__=1", "-D__HAVE_BFLOAT__=1"]
    folders = [x for i in (folder / "empty", *includes) for x in ("-I", str(i))]
    return compiler.clang([*_PREPROCESS, *macros, *folders, *("-D" + d for d in defines), str(path)])


@cache
def runtime():
    """The runtime as a loaded library; built at first use. One for each process.

    MSL_HOST_RUNTIME: another folder with its sources, for tests of the tests.
    """
    compiler = find_compiler()
    folder = Path(os.environ.get("MSL_HOST_RUNTIME") or HERE / "runtime")
    sources = sorted(folder.glob("*.c"))
    texts = [p.read_text() for p in (folder / "runtime.h", *sources)]
    path = cache_folder() / f"runtime-{_digest(*texts, _version(compiler))}.so"
    publish(path, lambda p: compiler.host_library(sources, p))
    # Kernels find msl_* and the mathematics of the C library through this one.
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
