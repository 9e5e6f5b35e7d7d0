"""The fixture lets good kernels pass, and each of its four ways catches what it is there for."""

import numpy as np
import pytest

from msl_host import Uninitialised, to_bfloat
from msl_host.cases import DEFECTS, LEGAL

X = np.random.default_rng(0).standard_normal(512).astype(np.float32)


def _arguments(case, **others):
    source = (DEFECTS.get(case) or LEGAL[case]).source
    args = dict(x=X, out=Uninitialised((512,), np.float32)) | others
    return dict(source=source, name="k", args=args, grid=512, threadgroup=128)


def _mirrored():
    return X.reshape(4, 128)[:, ::-1].reshape(-1).astype(np.float64)


def test_good_kernel(four_ways):
    seen = four_ways(**_arguments("reduction_tree"), limit=1e-6,
                     expected={"out": np.repeat(X.reshape(4, 128).astype(np.float64).sum(1), 128)})  # fmt: skip
    assert 0 < seen.errors["out"] < 1e-6
    assert seen.fast.statistics.threadgroup_barriers == 4 * 8
    assert seen.strict.statistics.unique_bytes_read["x"] == seen.strict.statistics.bytes_written["out"] == 2048


def test_wrong_value_is_caught(four_ways):
    with pytest.raises(AssertionError, match="error of out is"):
        four_ways(**_arguments("loop_two_barriers"), limit=1e-6, expected={"out": 4 * _mirrored()})


def test_defect_is_caught_though_the_values_are_right(four_ways):
    with pytest.raises(AssertionError, match="strict:\n.*race-read-after-write"):
        four_ways(**_arguments("barrier_mem_none"), limit=1e-6, expected={"out": _mirrored()})


def test_dependence_on_the_schedule_is_caught(four_ways):
    source = """
      #include <metal_stdlib>
      using namespace metal;
      [[kernel]] void k(const device float* x [[buffer(0)]], device atomic_float* sum [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
        atomic_fetch_add_explicit(sum, x[i], memory_order_relaxed);
      }"""
    with pytest.raises(AssertionError, match="depends on the schedule"):
        four_ways(source, "k", dict(x=X * np.exp(5 * X), sum=np.zeros(1, np.float32)), 512, 128, limit=1e-3,
                  expected={"sum": (X * np.exp(5 * X)).astype(np.float64).sum(keepdims=True)})  # fmt: skip


def test_bfloat_outputs_are_judged_against_their_rounding(four_ways):
    source = """
      #include <metal_stdlib>
      using namespace metal;
      [[kernel]] void k(const device float* x [[buffer(0)]], device bfloat* y [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
        y[i] = bfloat(%s);
      }"""
    arguments = dict(name="k", args=dict(x=X, y=Uninitialised((512,), np.uint16)), grid=512, threadgroup=64, limit=1.05,
                     bfloat={"y"}, expected={"y": 3 * X.astype(np.float64)})  # fmt: skip
    assert four_ways(source % "3 * x[i]", **arguments).errors["y"] == pytest.approx(1, abs=0.01)
    with pytest.raises(AssertionError, match="error of y is"):
        four_ways(source % "bfloat(x[i]) * bfloat(3.0f)", **arguments)
    assert to_bfloat(np.float32(1)).item() == 0x3F80
