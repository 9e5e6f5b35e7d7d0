"""The fixture `four_ways`: one kernel, run fast, checked, in lock step, and under ten random schedules.

    from msl_host.fixtures import four_ways  # noqa: F401

    def test_scale(four_ways):
        four_ways(source, "scale", args=dict(x=x, y=Uninitialised(x.shape, np.float32)), grid=x.size,
                  threadgroup=256, expected={"y": 2.0 * x.astype(np.float64)}, limit=1e-7)
"""

from dataclasses import dataclass

import numpy as np
import pytest

from .run import Kernel, Result, from_bfloat, to_bfloat

SCHEDULES = 10


@dataclass(frozen=True)
class FourWays:
    """What was seen. errors: by output, what `limit` bounds; the Results are of the single runs."""

    errors: dict
    fast: Result
    strict: Result
    lockstep: Result


def _rms(values):
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _error(result, expected, is_bfloat):
    """RMS error over the RMS of the expected values; for bfloat bits, over that of rounding them."""
    if not is_bfloat:
        return _rms(np.asarray(result, np.float64) - expected) / _rms(expected)
    rounding = _rms(from_bfloat(to_bfloat(expected)).astype(np.float64) - expected)
    return _rms(from_bfloat(result).astype(np.float64) - expected) / rounding


def run_four_ways(source, name, args, grid, threadgroup, expected, limit, template_args=(), function_constants=None,
                  bfloat=(), allowed=(), build_options=None, **run_options):  # fmt: skip
    """Run one kernel four ways; raises AssertionError with what was wrong.

    expected: float64 arrays by output; limit: largest relative RMS error, and for outputs named in
    `bfloat` (uint16 bits) the largest error over the rounding to bfloat (1.05 is strict). allowed:
    kinds of findings that are known to be harmless in the strict run. Returns FourWays.
    """
    kernels = [Kernel(source, name, template_args, function_constants, checked=checked, **(build_options or {}))
               for checked in (False, True)]  # fmt: skip
    fast = kernels[0].run(args, grid, threadgroup, **run_options)
    strict = kernels[1].run(args, grid, threadgroup, **run_options)
    lockstep = kernels[1].run(args, grid, threadgroup, lockstep=True, **run_options)
    for result, what in ((fast, "fast"), (strict, "strict"), (lockstep, "lock-step")):
        wrong = [f for f in result.report if f.kind not in allowed]
        assert result.completed and not wrong, f"{name}, {what}:\n" + "\n".join(map(str, result.report))
    errors = {output: _error(fast[output], value, output in bfloat) for output, value in expected.items()}
    for output, error in errors.items():
        assert error <= limit, f"{name}: error of {output} is {error:.3g}, more than {limit:.3g}"
        assert _error(strict[output], expected[output], output in bfloat) <= limit, f"{name}: {output}, checked build"
    _same_under_every_schedule(name, kernels[0], fast, args, grid, threadgroup, run_options)
    return FourWays(errors, fast, strict, lockstep)


def _same_under_every_schedule(name, kernel, fast, args, grid, threadgroup, run_options):
    for seed in range(SCHEDULES):
        result = kernel.run(args, grid, threadgroup, seed, **run_options)
        for output, value in fast.outputs.items():
            same = np.array_equal(result[output].view(np.uint8), value.view(np.uint8))
            assert same, f"{name}: {output} depends on the schedule (seed {seed})"


@pytest.fixture
def four_ways():
    """run_four_ways, as a fixture."""
    return run_four_ways
