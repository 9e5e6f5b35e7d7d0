"""The package as built and installed: the compiler pair, the extension and its guard, the wheel's content.

The extension's guard is tried in child processes, on a copy of the package made of links, so that nothing here
touches the installed one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import pytest

import qwen_metal
from qwen_metal import extension
from qwen_metal.kernels.source import metal_dir

PACKAGE = Path(qwen_metal.__file__).parent
CHECKOUT = Path(__file__).resolve().parents[1]
COMPILERS = ("c++", "g++", "clang++")

needs_checkout = pytest.mark.skipif(not (CHECKOUT / "setup.py").is_file(), reason="needs the checkout")
needs_build_tools = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("setuptools", "nanobind", "cmake", "ninja")),
    reason="needs the build requirements",
)


def built_extension():
    """The extension's file. Absent is a reason to skip only where it could not be there."""
    found = extension.status()
    if found.path is not None and not found.reason.startswith("switched off"):
        return Path(found.path)
    asked = os.environ.get("CXX", "").split()[:1]
    if found.build.get("built") is False and any(shutil.which(name) for name in asked or COMPILERS):
        pytest.fail(f"there is a compiler here, but the extension was {found.reason}")
    pytest.skip(f"no extension: {found.reason}")


def internals_key(file):
    keys = set(re.findall(rb"nanobind_system_\w+_v\d+\w*", Path(file).read_bytes()))
    assert len(keys) == 1, f"{file}: {keys}"
    return keys.pop().decode()


# --- the pair -------------------------------------------------------------------------------------------------


@needs_checkout
@needs_build_tools
def test_the_pinned_pair_shares_one_internals_version():
    from importlib.metadata import version

    text = (CHECKOUT / "pyproject.toml").read_text()
    pinned = dict(re.findall(r'^    "(mlx|nanobind)(?:\[cpu\])?==([\d.]+)",$', text, re.M))
    assert set(pinned) == {"mlx", "nanobind"}, "each is pinned once, exactly, in [build-system]"
    assert version("nanobind") == pinned["nanobind"]
    assert version("mlx") == pinned["mlx"]
    assert re.search(rf'"mlx>={re.escape(pinned["mlx"])},', text), "the run-time range starts at the pinned one"

    header = (Path(find_spec("nanobind").origin).parent / "src/nb_internals.h").read_text()
    number = re.search(r"define NB_INTERNALS_VERSION (\d+)", header)[1]
    assert internals_key(mx.__file__).endswith(f"_v{number}")


def test_the_extension_shares_its_types_with_mlx():
    assert internals_key(built_extension()) == internals_key(mx.__file__)


# --- the built file -------------------------------------------------------------------------------------------


def test_the_extension_is_there_and_used():
    file = built_extension()
    found = extension.status()
    assert found.available, found.reason
    assert found.mlx_version == mx.__version__
    assert Path(found.path) == file
    module = extension.load()
    assert module.mlx_version == mx.__version__
    x = mx.arange(6, dtype=mx.bfloat16)
    assert mx.array_equal(module.probe(x), x)


def test_build_info_and_cpu_features_use_the_same_names():
    built_extension()
    module = extension.load()
    info, features = module.build_info(), module.cpu_features()
    assert set(info) == {"compiler", "mlx", "nanobind", "instruction_sets"}
    assert set(features) == {"avx2", "avx512", "avx512bf16", "neon"}
    assert all(type(v) is bool for v in features.values())
    assert set(info["instruction_sets"]) <= set(features)
    if Path("/proc/cpuinfo").exists() and features["neon"] is False:
        flags = Path("/proc/cpuinfo").read_text().split()
        assert features["avx2"] == ("avx2" in flags and "fma" in flags)
        assert features["avx512"] == {"avx512f", "avx512bw", "avx512dq", "avx512vl"}.issubset(flags)
        assert features["avx512bf16"] == ("avx512_bf16" in flags and features["avx512"])


def test_libmlx_is_found_from_the_extensions_own_place(tmp_path):
    """As installed, beside mlx: a process that has not imported mlx finds libmlx through the file's own path."""
    file = built_extension()
    (tmp_path / "qwen_metal").mkdir()
    shutil.copy(file, tmp_path / "qwen_metal" / file.name)
    (tmp_path / "mlx").symlink_to(Path(mx.__file__).parent)
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "qwen_metal" / file.name)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_extension_needs_only_libmlx_and_the_compilers_libraries():
    text = subprocess.run(["readelf", "-d", built_extension()], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0"}
    assert "libmlx.so" in needed
    assert {n for n in needed if not n.startswith("ld-linux")} <= system | {"libmlx.so"}
    assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text) == ["$ORIGIN/../mlx/lib"]


# --- the guard ------------------------------------------------------------------------------------------------


@pytest.fixture
def package_copy(tmp_path):
    """make(so, record) -> a folder to put first on the path, with that extension file and that record.

    `so="built"` is the installed one. The copy is extension.py under an empty package, which starts ten times
    faster, or the whole package.
    """

    def make(so=None, record=None, name=f"_ext{EXTENSION_SUFFIXES[0]}", whole=False):
        package = tmp_path / "copy" / "qwen_metal"
        package.mkdir(parents=True)
        if whole:
            for entry in PACKAGE.iterdir():
                if not entry.name.startswith("_ext.") and entry.name not in ("_build.json", "__pycache__"):
                    (package / entry.name).symlink_to(entry)
        else:
            (package / "__init__.py").touch()
            (package / "extension.py").symlink_to(PACKAGE / "extension.py")
        if so == "built":
            (package / name).symlink_to(built_extension())
        elif so is not None:
            (package / name).write_bytes(so)
        if record is not None:
            (package / "_build.json").write_text(record if isinstance(record, str) else json.dumps(record))
        return package.parent

    return make


def ask(code, path=None, *options, **env):
    """Runs code in a child after `from qwen_metal import extension`; returns (stdout, stderr)."""
    env = {k: v for k, v in os.environ.items() if k != "QWEN_METAL_NO_EXTENSION"} | env
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *options, "-c", f"from qwen_metal import extension\n{code}"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


REASON = "assert extension.load() is None; print(extension.status().reason)"


def test_import_loads_nothing():
    out, err = ask("import sys, qwen_metal; print('qwen_metal._ext' in sys.modules, extension._result)")
    assert (out, err) == ("False None", "")


def test_switched_off_by_the_environment(package_copy):
    path = package_copy(so=b"not even looked at")
    out, err = ask(REASON, path, QWEN_METAL_NO_EXTENSION="1")
    assert (out, err) == ("switched off by QWEN_METAL_NO_EXTENSION", "")
    out, _ = ask("print(extension.status().reason)", path, QWEN_METAL_NO_EXTENSION="0")
    assert "switched off" not in out


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (None, "not built"),
        ("{ not json", "not built"),
        ({"built": False, "reason": "no C++ compiler"}, "not built: no C++ compiler"),
        ({"built": True, "mlx": "0.32.4"}, "was built, but the file is gone from "),
    ],
)
def test_a_missing_extension_says_why_and_does_not_warn(package_copy, record, reason):
    out, err = ask(REASON, package_copy(record=record))
    assert out.startswith(reason)
    assert err == ""


def test_an_extension_for_another_python_is_named(package_copy):
    out, err = ask(REASON, package_copy(so=b"x", name="_ext.cpython-36m-other.so"))
    assert out == "built for another Python (_ext.cpython-36m-other.so); reinstall qwen-metal"
    assert err == ""


@pytest.mark.parametrize("content", [b"", b"garbage" * 1000])
def test_a_corrupt_extension_is_one_line(package_copy, content):
    out, err = ask(REASON + "; extension.load()", package_copy(so=content))
    assert out.startswith("cannot be loaded: ")
    assert len(err.splitlines()) == 1 and "extension not used: cannot be loaded" in err, err


def test_one_that_cannot_be_loaded_because_it_is_for_another_mlx_says_so(package_copy):
    out, _ = ask(REASON, package_copy(so=b"garbage", record={"built": True, "mlx": "0.1.0"}))
    assert out == f"built for mlx 0.1.0, this is mlx {mx.__version__}"


OTHER_MLX = "import mlx.core as mx; mx.__version__ = '0.33.9'\n"


def test_one_built_for_another_mlx_is_not_used(package_copy):
    path = package_copy(so="built")
    out, err = ask(OTHER_MLX + REASON + "; extension.load()", path)
    assert out == f"built for mlx {extension.status().mlx_version}, this is mlx 0.33.9"
    assert len(err.splitlines()) == 1 and "RuntimeWarning: qwen-metal: extension not used: built for" in err, err
    out, err = ask(OTHER_MLX + REASON, path, "-W", "error")
    assert out.startswith("built for")
    assert err == f"qwen-metal: extension not used: {out}; everything works without it"


GENERATE = """
import mlx_lm, qwen_metal, qwen_metal.demo
model, tokenizer = qwen_metal.load(qwen_metal.demo.path())
print(mlx_lm.generate(model, tokenizer, prompt="Once", max_tokens=8))
"""


@pytest.mark.parametrize("why", ["another mlx", "corrupt", "missing"])
def test_everything_works_without_it(package_copy, why):
    path = package_copy(so={"another mlx": "built", "corrupt": b"garbage", "missing": None}[why], whole=True)
    before = OTHER_MLX if why == "another mlx" else ""
    out, err = ask(before + "assert extension.load() is None\n" + GENERATE, path)
    assert out
    assert err.count("extension not used") == (why != "missing")


@pytest.fixture
def fresh_guard(monkeypatch):
    monkeypatch.setattr(extension, "_result", None)
    monkeypatch.setattr(extension, "_file", lambda: Path("_ext.so"))
    monkeypatch.delenv("QWEN_METAL_NO_EXTENSION", raising=False)
    return monkeypatch


def rejects(x, stream=None):
    raise TypeError("probe(): incompatible function arguments. Invoked with types: mlx.core.array")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (types.SimpleNamespace(mlx_version=mx.__version__, probe=rejects), "does not take mlx's arrays (TypeError"),
        (types.SimpleNamespace(mlx_version=mx.__version__, probe=lambda x, stream: x + 1), "changed an array"),
        (types.SimpleNamespace(mlx_version="0.0.1", probe=rejects), "built for mlx 0.0.1, this is"),
        (types.SimpleNamespace(), "AttributeError"),
    ],
)
def test_every_refusal_is_one_warning(fresh_guard, module, reason):
    """A nanobind that does not match mlx imports cleanly and rejects every array: only the call shows it."""
    fresh_guard.setattr(extension, "_import", lambda version: module)
    with pytest.warns(RuntimeWarning, match="extension not used") as caught:
        assert extension.load() is None
        assert extension.load() is None
    assert len(caught) == 1
    assert extension.status().reason.startswith(reason)
    assert "\n" not in extension.status().reason


def test_threads_get_one_answer(fresh_guard):
    calls, gate, got = [], threading.Barrier(8), []
    module = types.SimpleNamespace(mlx_version=mx.__version__, probe=lambda x, stream: x, build_info=dict)
    fresh_guard.setattr(extension, "_import", lambda version: calls.append(version) or module)

    def work():
        gate.wait()
        got.append(extension.load())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1
    assert got == [module] * 8


@pytest.mark.parametrize("around", [mx.compile, mx.grad, mx.vmap])
def test_the_first_use_may_be_inside_a_transformation(package_copy, around):
    path = package_copy(so="built")
    code = (
        "import mlx.core as mx\n"
        "def f(x):\n"
        "    assert extension.load() is not None, extension.status().reason\n"
        "    return (x * x).sum()\n"
        f"mx.eval(mx.{around.__name__}(f)(mx.ones((2, 3))))"
    )
    assert ask(code, path) == ("", "")


# --- building and packing -------------------------------------------------------------------------------------


@pytest.fixture
def source_copy(tmp_path):
    """A copy of the checkout without what was built in it."""
    target = tmp_path / "source"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.so", "_build.json", "__pycache__", "*.egg-info", "tests")
    shutil.copytree(CHECKOUT, target, ignore=ignore)
    return target


def build_here(source, out, **env):
    """setup.py's own build, without pip between us and its output."""
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", out / "lib", "--build-temp", out / "temp"],
        cwd=source,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


def bin_without(tmp_path, names):
    """A PATH with the machine's usual tools, but not these."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "env", "uname", "cat", "ld", "ar", "ranlib", "nm"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    assert not any(shutil.which(name, path=folder) for name in names)
    return str(folder)


@needs_checkout
@needs_build_tools
@pytest.mark.parametrize(
    ("cxx", "reason"),
    [
        ("", "no C++ compiler (c++, g++ or clang++)"),
        ("/nonexistent", "the C++ compiler named by CXX, /nonexistent, is not there"),
        (shutil.which("false"), "CMake could not configure: CMake Error at "),
    ],
)
def test_a_build_that_fails_is_one_line(source_copy, tmp_path, cxx, reason):
    env = {"CXX": cxx} if cxx else {"CXX": "", "PATH": bin_without(tmp_path, COMPILERS)}
    done = build_here(source_copy, tmp_path, **env)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("qwen-metal:")]
    assert done.stdout == "" and len(lines) == 1, done.stdout + done.stderr
    assert lines[0].startswith(f"qwen-metal: extension not built: {reason}")
    assert lines[0].endswith("; the package works without it")
    record = json.loads((tmp_path / "lib/qwen_metal/_build.json").read_text())
    assert record["built"] is False and record["reason"].startswith(reason)
    assert not list((tmp_path / "lib/qwen_metal").glob("*.so"))


def tree(folder, under=""):
    files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {under + str(p.relative_to(folder)) for p in files}


@needs_checkout
@needs_build_tools
def test_a_machine_without_a_compiler_installs_all_the_same(source_copy, tmp_path):
    """And the wheel it makes has everything but the extension."""
    env = os.environ | {"PATH": bin_without(tmp_path, COMPILERS), "CXX": "", "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps"]
    target = tmp_path / "site"
    done = subprocess.run(
        [*command, "--target", target, source_copy], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("extension not built: no C++ compiler") == 1

    package = target / "qwen_metal"
    got = tree(package)
    expected = tree(CHECKOUT / "src/qwen_metal") | tree(CHECKOUT / "metal", "metal/") | {"_build.json"}
    expected = {f for f in expected if not f.endswith(".so")}
    assert got == expected
    out, err = ask(REASON, target)
    assert (out, err) == ("not built: no C++ compiler (c++, g++ or clang++)", "")


@pytest.mark.slow
@needs_checkout
@needs_build_tools
def test_the_sdist_and_the_checkout_build_the_same_wheel(source_copy, tmp_path):
    built_extension()
    sdist = "from setuptools import build_meta; print(build_meta.build_sdist('sdist'))"
    done = subprocess.run([sys.executable, "-c", sdist], cwd=source_copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = (source_copy / "sdist").glob("*.tar.gz")
    names = {}
    for what, source in (("sdist", archive), ("checkout", source_copy)):
        out = tmp_path / what
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out, source]
        done = subprocess.run(command, env=os.environ | {"PIP_NO_INDEX": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (wheel,) = out.glob("*.whl")
        names[what] = {n: zipfile.ZipFile(wheel).getinfo(n).CRC for n in zipfile.ZipFile(wheel).namelist()}
    same = {n for n in names["sdist"] if not n.endswith((".so", "RECORD", "METADATA"))}
    assert names["sdist"].keys() == names["checkout"].keys()
    assert {n: names["sdist"][n] for n in same} == {n: names["checkout"][n] for n in same}
    assert any(n.startswith("qwen_metal/_ext.") for n in names["sdist"])
    assert "qwen_metal/metal/README.md" in names["sdist"]


def test_the_kernel_text_is_found():
    assert (metal_dir() / "README.md").is_file()
    inside = PACKAGE / "metal"
    assert metal_dir() == (inside if inside.is_dir() else PACKAGE.parents[1] / "metal").resolve()
