"""Kernel and run: arguments, results, statistics, options, and what is refused."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from msl_host import CompileError, CompilerMissing, Kernel, Uninitialised, build, find_compiler, from_bfloat, to_bfloat
from msl_host.cases import DEFECTS, LEGAL

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
SCALE = HEAD + """
constant float factor [[function_constant(0)]];
constant bool negate [[function_constant(1)]];
template <typename T, int N>
[[kernel]] void scale(const device T* x [[buffer(0)]], device T* y [[buffer(1)]], const constant int& n [[buffer(2)]],
                      uint i [[thread_position_in_grid]]) {
  T v = x[i] * T(factor) * T(N);
  if (is_function_constant_defined(negate) && negate) v = -v;
  if (int(i) < n) y[i] = v;
}
template [[host_name("scale_float_3")]] [[kernel]] decltype(scale<float, 3>) scale<float, 3>;
"""
X = np.arange(64, dtype=np.float32)


def _scale_arguments(n=64):
    return dict(x=X, y=Uninitialised((64,), np.float32), n=n)


def test_template_arguments_and_function_constants():
    kernel = Kernel(SCALE, "scale", ("float", 2), {0: 1.5, "negate": True})
    assert np.array_equal(kernel.run(_scale_arguments(), 64, 32)["y"], X * -3)
    assert np.array_equal(Kernel(SCALE, "scale_float_3", (), {0: 1.0}).run(_scale_arguments(), 64, 32)["y"], X * 3)
    half = Kernel(SCALE, "scale", ("half", 2), {0: 1.5})
    result = half.run(dict(x=X.astype(np.float16), y=Uninitialised((64,), np.float16), n=64), 64, 32)
    assert np.array_equal(result["y"], (X * 3).astype(np.float16))


def test_inputs_stay_and_unwritten_outputs_are_nan():
    kernel = Kernel(SCALE, "scale", ("float", 2), {0: 1.0}, checked=True)
    given = np.full(64, 7, np.float32)
    result = kernel.run(dict(x=X, y=given, n=10), 64, 32)
    assert not result.report and np.array_equal(result["y"][10:], given[10:])
    assert np.all(given == 7) and np.array_equal(X, np.arange(64))
    assert np.isnan(kernel.run(_scale_arguments(10), 64, 32)["y"][10:]).all()


def test_statistics():
    source = LEGAL["loop_two_barriers"].source
    result = Kernel(source, "k", checked=True).run(dict(x=np.zeros(512, np.float32),
                                                         out=Uninitialised((512,), np.float32)), 512, 128)  # fmt: skip
    seen = result.statistics
    assert (seen.threadgroups, seen.threadgroup_barriers, seen.simd_operations) == (4, 32, 0)
    assert seen.threadgroup_bytes == 512 and seen.divergent_operations == 0
    assert seen.unique_bytes_read == {"x": 2048, "out": 0} and seen.bytes_written == {"x": 0, "out": 2048}
    shuffles = LEGAL["shuffles"]
    assert shuffles.run(shuffles.kernel(checked=False)).statistics.simd_operations == 6 * 512 // 32
    branch = LEGAL["simd_sum_in_branch"]
    assert branch.run(branch.kernel(checked=False)).statistics.divergent_operations == 512 // 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(args=dict(z=X)), "no buffers"),
        (dict(threadgroup=(64, 32)), "more than 1024"),
        (dict(grid=(64, 0)), "positive"),
        (dict(grid=2**33), "threadgroups"),
        (dict(threadgroup=(2**32, 2**32)), "more than 1024"),
        (dict(resident=0), "resident"),
    ],
)
def test_bad_sizes_are_refused(arguments, message):
    kernel = Kernel(SCALE, "scale", ("float", 2), {0: 1.0})
    with pytest.raises(ValueError, match=message):
        kernel.run(**dict(args=_scale_arguments(), grid=64, threadgroup=32) | arguments)


def test_numbers_and_lists_take_the_type_of_the_parameter():
    source = HEAD + """[[kernel]] void k(const device float* x [[buffer(0)]], constant half& by [[buffer(1)]],
        constant ushort& n [[buffer(2)]], device float* y [[buffer(3)]], uint i [[thread_position_in_grid]]) {
      y[i] = x[i] * by + n;
    }"""
    result = Kernel(source, "k", checked=True).run(
        dict(x=[1, 2, 3], by=0.5, n=7, y=Uninitialised((3,), np.float32)), 3, 3
    )  # fmt: skip
    assert not result.report and result["y"].tolist() == [7.5, 8.0, 8.5]
    with pytest.raises(ValueError, match="x is float: pass float32, not float64"):
        Kernel(source, "k").run(dict(x=X.astype(np.float64)), 3, 3)


def test_a_missing_buffer_is_named_as_such():
    source = HEAD + "[[kernel]] void k(device float* y [[buffer(0)]]) {\n  y[0] = 1;\n}"
    (finding,) = Kernel(source, "k", checked=True).run({}, 1, 1).report
    assert finding.line == 4 and "not passed" in finding.text
    with pytest.raises(ValueError, match="buffers 0 to 30"):
        Kernel(source.replace("buffer(0)", "buffer(31)"), "k")


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("memory", ["device float* p = y", "threadgroup float a[8]; threadgroup float* p = a",
                                    "float a[8]; thread float* p = a"])  # fmt: skip
def test_a_runaway_store_ends_the_launch_only(memory, checked):
    body = f"  {memory};\n  fill(p);\n  y[0] = p[5];\n"
    kind = memory.split()[0].replace("float", "thread")
    fill = f"__attribute__((noinline)) void fill({kind} float* p) {{ for (int i = 0; i < 100000000; i++) p[i] = 1; }}\n"
    source = HEAD + fill + "[[kernel]] void k(device float* y [[buffer(0)]]) {\n" + body + "}"
    result = Kernel(source, "k", checked=checked).run(dict(y=Uninitialised((8,), np.float32)), 1, 1)
    assert not result.completed and result.defects[0].line == 3


def test_compile_errors_name_the_metal_line():
    with pytest.raises(CompileError, match=r"kernel.metal:4:.*undeclared"):
        Kernel(HEAD + "[[kernel]] void k(device float* y [[buffer(0)]]) {\n  y[0] = nothing;\n}", "k")
    with pytest.raises(KeyError, match="no kernel named 'j'"):
        Kernel(SCALE, "j")
    unknown = HEAD + "[[kernel]] void k(device float* y [[buffer(0)]], float4 p [[position]]) { y[0] = 0; }"
    with pytest.raises(ValueError, match="does not know the attribute"):
        Kernel(unknown, "k")


@pytest.mark.parametrize(
    "body",
    [
        "device float* p = t;",
        "threadgroup float* p = y;",
        "std::vector<int> v;",
        "const constant float& c = n; c = 1;",
        "float v = as_type<float>(half(1));",
    ],
)
def test_what_metal_refuses_is_refused(body):
    source = HEAD + (
        "[[kernel]] void k(device float* y [[buffer(0)]], const constant float& n [[buffer(1)]],"
        " threadgroup float* t [[threadgroup(0)]]) {" + body + "}"
    )
    with pytest.raises(CompileError):
        Kernel(source, "k")


def test_denormals_are_kept_or_flushed():
    kernel = Kernel(SCALE, "scale", ("float", 1), {0: 0.25})
    tiny = np.full(64, 2e-38, np.float32)
    args = dict(x=tiny, y=Uninitialised((64,), np.float32), n=64)
    assert np.all(kernel.run(args, 64, 32)["y"] > 0)
    assert np.all(kernel.run(args, 64, 32, flush_denormals=True)["y"] == 0)
    assert np.all(kernel.run(args, 64, 32)["y"] > 0)  # put back


def test_interleaved_threadgroups_see_each_other_and_others_do_not():
    case = DEFECTS["spin_on_later_threadgroup"]
    kernel = case.kernel()
    alone = case.run(kernel, resident=1)
    assert not alone.completed and [f.kind for f in alone.report] == ["endless-spin"]
    together = case.run(kernel, resident=4)
    assert together.completed and not together.report
    for seed in range(5):
        assert case.run(kernel, seed=seed, resident=4).completed


def test_lockstep_orders_lanes_after_simd_operations_only():
    source = HEAD + """
      [[kernel]] void k(const device float* x [[buffer(0)]], device float* out [[buffer(1)]],
                        uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
        threadgroup float tile[32];
        tile[t] = simd_sum(x[i]);
        float v = simd_sum(1.0f);
        out[i] = tile[31 - t] + v;
      }"""
    kernel = Kernel(source, "k", checked=True)
    args = dict(x=X, out=Uninitialised((64,), np.float32))
    assert {f.kind for f in kernel.run(args, 64, 32).report} == {"race-read-after-write"}
    assert not kernel.run(args, 64, 32, lockstep=True).report
    lane_exchange = DEFECTS["lane_exchange"]
    assert lane_exchange.run(lane_exchange.kernel(), lockstep=True).report


def test_a_defect_does_not_disturb_the_next_launch():
    wild, good = DEFECTS["wild_address"], LEGAL["reduction_tree"]
    kernels = wild.kernel(checked=False), good.kernel()
    expected = good.run(kernels[1])["out"]
    for _ in range(3):
        assert [f.kind for f in wild.run(kernels[0]).report] == ["wild-address"]
        result = good.run(kernels[1])
        assert not result.report and np.array_equal(result["out"], expected)


def test_the_fast_build_finds_what_needs_no_instrumentation():
    names = "barrier_in_branch early_return shuffle_inactive endless_spin wild_address endless_loop"
    for name in names.split():
        case = DEFECTS[name]
        found = {(f.kind, f.line) for f in case.run(case.kernel(checked=False)).report}
        assert found == case.expected, name


def test_write_beyond_a_buffer_shows_in_the_fast_build_too():
    case = DEFECTS["device_write_past_end"]
    (finding,) = case.run(case.kernel(checked=False)).report
    assert finding.kind == "device-out-of-bounds" and "'out'" in finding.text


# ---- floats ----


def _patterns():
    random = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65520, 5.96e-8, 2.98e-8, 1e-40], np.float32)
    return np.concatenate([random, edges])


def test_runtime_conversions_agree_with_numpy():
    import ctypes

    library = build.runtime()
    library.msl_test_half.argtypes = library.msl_test_bfloat.argtypes = [ctypes.c_float]
    library.msl_test_half_from_double.argtypes = [ctypes.c_double]
    library.msl_test_half_value.restype = ctypes.c_float
    values = [v for v in _patterns() if not np.isnan(v)]
    with np.errstate(over="ignore", invalid="ignore"):
        for value in values:
            assert library.msl_test_half(value) & 0xFFFF == np.float32(value).astype(np.float16).view(np.uint16)
            assert library.msl_test_bfloat(value) & 0xFFFF == to_bfloat(np.float32(value))
            double = float(value) * (1 + 2.0**-30)
            expected = np.float64(double).astype(np.float16).view(np.uint16)
            assert library.msl_test_half_from_double(double) & 0xFFFF == expected
    for bits in range(65536):
        expected = np.uint16(bits).view(np.float16).astype(np.float32)
        given = library.msl_test_half_value(bits)
        assert given == expected or (np.isnan(given) and np.isnan(expected))


ROUNDING = HEAD + """
  [[kernel]] void k(const device bfloat* a [[buffer(0)]], const device bfloat* b [[buffer(1)]],
                    device bfloat* sum [[buffer(2)]], device bfloat* product [[buffer(3)]],
                    device half* narrow [[buffer(4)]], uint i [[thread_position_in_grid]]) {
    sum[i] = a[i] + b[i] + a[i];
    product[i] = a[i] * b[i];
    narrow[i] = half(a[i]) * half(b[i]) + half(1);
  }"""


@pytest.mark.parametrize("baseline", [False, True])
def test_bfloat_and_half_round_after_each_operation(baseline, monkeypatch):
    if baseline:
        monkeypatch.setenv("MSL_HOST_BASELINE", "1")
    build.machine_flags.cache_clear()
    try:
        kernel = Kernel(ROUNDING, "k")
    finally:
        monkeypatch.undo()
        build.machine_flags.cache_clear()
    rng = np.random.default_rng(1)
    a, b = (to_bfloat(rng.standard_normal(4096).astype(np.float32)) for _ in range(2))
    out = {name: Uninitialised((4096,), np.uint16) for name in ("sum", "product")}
    result = kernel.run(dict(a=a, b=b, narrow=Uninitialised((4096,), np.float16), **out), 4096, 256)
    wide_a, wide_b = from_bfloat(a), from_bfloat(b)
    once = from_bfloat(to_bfloat(wide_a + wide_b))
    assert np.array_equal(result["sum"], to_bfloat(once + wide_a))
    assert np.array_equal(result["product"], to_bfloat(wide_a * wide_b))
    half = wide_a.astype(np.float16) * wide_b.astype(np.float16) + np.float16(1)
    assert np.array_equal(result["narrow"], half)


# ---- compiler and cache ----


def test_missing_compiler_gives_one_line(monkeypatch):
    monkeypatch.delenv("MSL_HOST_COMPILER", raising=False)
    monkeypatch.setattr(build, "_wheel", lambda: None)
    monkeypatch.setattr(build, "_debian", lambda name="clang-19": None)
    with pytest.raises(CompilerMissing, match=r"^no compiler for Metal kernels: pip install ziglang==") as raised:
        find_compiler()
    assert "\n" not in str(raised.value)


def test_compiler_can_be_chosen(monkeypatch):
    monkeypatch.setenv("MSL_HOST_COMPILER", "no-such-clang")
    with pytest.raises(CompilerMissing, match="no-such-clang: not found"):
        find_compiler()


def test_kernels_come_from_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MSL_HOST_CACHE", str(tmp_path))
    build._shim.cache_clear()
    try:
        first, second = (Kernel(SCALE, "scale", ("float", 9), {0: 1.0}) for _ in range(2))
        other = Kernel(SCALE, "scale", ("float", 9), {0: 2.0})
    finally:
        build._shim.cache_clear()
    assert first.compile_seconds > 0 and second.compile_seconds == 0 and other.compile_seconds > 0
    assert len(list(tmp_path.glob("kernel-*.so"))) == 2


_IN_A_PROCESS = """
import numpy as np, sys
from msl_host import Kernel, Uninitialised
kernel = Kernel(sys.argv[1], "scale", ("float", 5), {0: 1.0})
x = np.arange(64, dtype=np.float32)
result = kernel.run(dict(x=x, y=Uninitialised((64,), np.float32), n=64), 64, 32)
sys.exit(not np.array_equal(result["y"], 5 * x))
"""


def test_cache_is_safe_for_parallel_processes(tmp_path):
    folder = str(Path(__file__).parents[1])
    environment = os.environ | {"MSL_HOST_CACHE": str(tmp_path), "PYTHONPATH": folder}
    command = [sys.executable, "-c", _IN_A_PROCESS, SCALE]
    running = [subprocess.Popen(command, env=environment) for _ in range(min(4, 2 * multiprocessing.cpu_count()))]
    assert [process.wait() for process in running] == [0] * len(running)
    # Nothing half-written stays behind.
    assert {p.suffix for p in tmp_path.iterdir() if p.is_file()} <= {".so", ".cl", ".metal"}
