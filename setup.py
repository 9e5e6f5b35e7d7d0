"""Builds the optional extension and carries metal/ into the wheel; everything else is in pyproject.toml.

The package works without the extension, so a failed build is one line and not an error. pip hides that
line, so it is also kept in qwen_metal/_build.json, where `qwen-metal doctor` finds it.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NANOBIND_MARKER = "cmake/nanobind-config.cmake"
MLX_MARKER = "share/cmake/MLX/MLXConfig.cmake"


class NotBuilt(Exception):
    """One line: what is missing."""

    def __init__(self, reason, log=""):
        super().__init__(reason)
        self.log = log


class CMakeExtension(Extension):
    def __init__(self, name):
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    def run(self):
        for ext in self.extensions:
            target = self.output_folder(ext)
            target.mkdir(parents=True, exist_ok=True)
            for stale in target.glob(f"{ext.name.rpartition('.')[2]}.*.so"):
                stale.unlink()
            try:
                record = {"built": True, "reason": "", **self.build_with_cmake(target)}
            except NotBuilt as error:
                record = {"built": False, "reason": str(error), "log": error.log}
                print(
                    f"qwen-metal: extension not built: {error}; the package works without it",
                    file=sys.stderr,
                    flush=True,
                )
            (target / "_build.json").write_text(json.dumps(record, indent=1) + "\n")

    def output_folder(self, ext):
        package = ext.name.rpartition(".")[0]
        if self.inplace:  # editable: into src/qwen_metal
            return Path(self.get_finalized_command("build_py").get_package_dir(package)).resolve()
        return Path(self.build_lib, *package.split(".")).resolve()

    def build_with_cmake(self, target):
        nanobind = find_package_folder("nanobind", NANOBIND_MARKER)
        mlx = find_package_folder("mlx", MLX_MARKER)
        compiler = find_compiler()
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        arguments = [
            "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={(nanobind / NANOBIND_MARKER).parent}",
            f"-DMLX_DIR={(mlx / MLX_MARKER).parent}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
        ]  # fmt: skip
        if sys.platform == "darwin":
            if archs := re.findall(r"-arch (\S+)", os.environ.get("ARCHFLAGS", "")):
                arguments.append(f"-DCMAKE_OSX_ARCHITECTURES={';'.join(archs)}")
            if "MACOSX_DEPLOYMENT_TARGET" not in os.environ:
                arguments.append("-DCMAKE_OSX_DEPLOYMENT_TARGET=14.0")  # mlx's own floor
        arguments += shlex.split(os.environ.get("CMAKE_ARGS", ""))

        # Objects are kept between builds, but never across a change of what they were made with.
        # (An editable install gives a new temporary folder each time: there, build/ of the checkout.)
        parent = ROOT / "build" if self.inplace else Path(self.build_temp).resolve()
        folder = parent / f"cmake-{sys.implementation.cache_tag}"
        installed = [str(f.stat().st_mtime_ns) for f in (mlx / MLX_MARKER, nanobind / NANOBIND_MARKER)]
        key = "\n".join([cmake, compiler, str(ROOT), *installed, *arguments])
        if not (folder / "key").is_file() or (folder / "key").read_text() != key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "key").write_text(key)

        run("CMake could not configure", [cmake, "-S", str(ROOT), "-B", str(folder), *arguments])
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        run("the compile failed", [cmake, "--build", str(folder), "-j", jobs])
        version = re.findall(
            r"#define MLX_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", (mlx / "include/mlx/version.h").read_text()
        )
        return {"compiler": compiler, "mlx": ".".join(version)}

    # What the commands around this one ask: there are no source files, and the output is what run() wrote.
    def get_source_files(self):
        return []

    def get_outputs(self):
        if self.inplace:
            return []
        return [str(f) for e in self.extensions for f in self.output_folder(e).glob("_*") if f.is_file()]

    def get_output_mapping(self):
        return {}


class BuildPy(build_py):
    """Wheels carry the top-level metal/ as qwen_metal/metal; a checkout reads it where it stands."""

    def run(self):
        if self.editable_mode:
            return super().run()
        # A module deleted since the last build must not come back out of build/.
        package = Path(self.build_lib, "qwen_metal")
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        shutil.copytree(ROOT / "metal", package / "metal", ignore=shutil.ignore_patterns(".*", "__pycache__"))

    def get_outputs(self, *args, **kwargs):
        metal = Path(self.build_lib, "qwen_metal", "metal")
        return super().get_outputs(*args, **kwargs) + [str(f) for f in metal.rglob("*") if f.is_file()]


def find_package_folder(name, marker):
    """The installed package's folder, without importing it (an mlx that cannot start must not end the build)."""
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / marker).is_file():
            return Path(folder).resolve()
    raise NotBuilt(f"{name} with its build files is not installed" if spec else f"{name} is not installed")


def find_tool(name):
    """cmake and ninja as pip installed them for this build (their bin may not be on PATH), else the machine's."""
    spec = importlib.util.find_spec(name)
    if spec and spec.origin:  # prefix/lib/python3.x/site-packages/cmake/__init__.py
        beside = Path(spec.origin).parents[4] / "bin" / name
        if beside.is_file():
            return str(beside)
    found = shutil.which(name)
    if found is None:
        raise NotBuilt(f"{name} is not installed")
    return found


def find_compiler():
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise NotBuilt(f"the C++ compiler named by CXX, {asked[0]}, is not there")
        return " ".join(asked)
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise NotBuilt("no C++ compiler (c++, g++ or clang++)")


def run(what, command):
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise NotBuilt(f"{what}: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        first = next((line for line in lines if re.search(r"\berror\b", line, re.I)), lines[-1] if lines else "")
        raise NotBuilt(f"{what}: {first[:200]}", log="\n".join(lines[-60:]))


setup(
    ext_modules=[CMakeExtension("qwen_metal._ext")],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy},
)
