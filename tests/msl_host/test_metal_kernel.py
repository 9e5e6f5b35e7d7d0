"""The stand-in for mx.fast.metal_kernel: the text it generates is MLX's, and what it runs is right."""

import mlx.core as mx
import numpy as np
import pytest

from msl_host.metal_kernel import MetalKernel, Options, metal_on_cpu, printed_source

# name, body, arguments of metal_kernel, arguments of the call; one feature or two each.
SIGNATURES = {
    "plain": ("uint i = thread_position_in_grid.x; out[i] = a[i];", {}, {"inputs": [(4, 17)]}),
    "small_and_scalar": (
        "uint i = thread_position_in_grid.x; out[i] = a[i] + b[0] + c;",
        {"input_names": ["a", "b", "c"]},
        {"inputs": [(4, 17), (7,), ()]},
    ),
    "python_numbers": (
        "out[thread_position_in_grid.x] = a + b + c;",
        {"input_names": ["a", "b", "c"]},
        {"inputs": [3, 2.5, True]},
    ),
    "layout": (
        "uint i = thread_position_in_grid.x; out[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)];",
        {"ensure_row_contiguous": False},
        {"inputs": [(4, 17)]},
    ),
    "shape_of_one_input": (
        "out[thread_position_in_grid.x] = a[0] * b_shape[1];",
        {"input_names": ["a", "b"]},
        {"inputs": [(4, 17), (8, 1)]},
    ),
    "templates": (
        "out[thread_position_in_grid.x] = T(N) + (B ? T(1) : T(0));",
        {},
        {"inputs": [(4, 17)], "template": [("T", mx.bfloat16), ("N", -3), ("B", True)]},
    ),
    "atomic_outputs": (
        "atomic_fetch_add_explicit(&out[0], a[0], memory_order_relaxed);",
        {"atomic_outputs": True},
        {"inputs": [(4, 17)], "init_value": 0},
    ),
    "two_outputs": (
        "out[thread_position_in_grid.x] = 1; other[0] = 2;",
        {"output_names": ["out", "other"]},
        {"inputs": [(4, 17)], "output_dtypes": [mx.uint8, mx.int16], "output_shapes": [(4,), (2,)]},
    ),
    "every_type": (
        "out[thread_position_in_grid.x] = a[0] + b[0] + c[0] + d[0] + e[0] + f[0];",
        {"input_names": ["a", "b", "c", "d", "e", "f"]},
        {
            "inputs": [
                ((9,), mx.bool_),
                ((9,), mx.uint8),
                ((9,), mx.int64),
                ((9,), mx.float16),
                ((9,), mx.bfloat16),
                ((9,), mx.uint32),
            ]
        },
    ),
    "attributes": (
        "out[0] = thread_index_in_simdgroup + simdgroup_index_in_threadgroup + threads_per_threadgroup.x"
        " + threadgroup_position_in_grid.y + thread_index_in_threadgroup + threads_per_simdgroup;",
        {},
        {"inputs": [(4, 17)]},
    ),
    "header": (
        "out[thread_position_in_grid.x] = twice(a[0]);",
        {"header": "inline float twice(float x) { return 2 * x; }\n"},
        {"inputs": [(4, 17)], "template": [("T", mx.float32)]},
    ),
}


def _value(description):
    if not isinstance(description, tuple):
        return description
    if len(description) == 2 and isinstance(description[1], mx.Dtype):
        return mx.zeros(description[0], description[1])
    return mx.zeros(description)


def _call_arguments(call):
    given = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(4, 17)], "output_dtypes": [mx.float32]}
    given |= {k: v for k, v in call.items() if k != "inputs"}
    return given, [_value(v) for v in call["inputs"]]


@pytest.mark.parametrize("case", SIGNATURES)
def test_generated_text_is_what_mlx_prints(case, capfd, tmp_path):
    body, made, call = SIGNATURES[case]
    made = {"input_names": ["a"], "output_names": ["out"], "source": body, "name": case} | made
    given, inputs = _call_arguments(call)
    kernel = mx.fast.metal_kernel(**made)
    arrays = [v for v in inputs if isinstance(v, mx.array)]

    def export(*given_arrays):
        rest = iter(given_arrays)
        values = [next(rest) if isinstance(v, mx.array) else v for v in inputs]
        return kernel(inputs=values, verbose=True, **given)

    mx.export_function(str(tmp_path / "kernel.mlxfn"), export, *arrays)
    expected = printed_source(capfd.readouterr().out)
    ours = MetalKernel(Options(), **made).generate(inputs, given["output_dtypes"], given.get("template", ()))
    assert ours.text.split() == expected.split()


def run(body, inputs, out_shapes, out_dtypes, grid, threadgroup, checked=True, template=None, init_value=None, **made):
    """Run one kernel; returns (outputs, launch)."""
    names = made.pop("input_names", [f"in{i}" for i in range(len(inputs))])
    outputs = made.pop("output_names", [f"out{i}" for i in range(len(out_shapes))])
    options = Options(checked=checked)
    kernel = MetalKernel(options, "test", names, outputs, body, **made)
    result = kernel(inputs=inputs, output_shapes=out_shapes, output_dtypes=out_dtypes, grid=grid,
                    threadgroup=threadgroup, template=template, init_value=init_value)  # fmt: skip
    return result, options.log[-1][1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_strided_input_through_its_layout(dtype):
    body = """
      uint i = thread_position_in_grid.x;
      out0[i] = in0[elem_to_loc(i, in0_shape, in0_strides, in0_ndim)] + T(in1[0]);
    """
    a = mx.arange(6 * 10).reshape(6, 10).astype(dtype)
    view = a[1:5, ::3].T
    for contiguous in (True, False):
        (out,), launch = run(body, [view, mx.array([0.5])], [view.shape], [dtype], (view.size, 1, 1), (8, 1, 1),
                             template=[("T", dtype)], ensure_row_contiguous=contiguous)  # fmt: skip
        assert not launch.report
        assert mx.array_equal(out, view + mx.array(0.5, dtype))


def test_strides_are_the_arrays_own_without_the_copy():
    a = mx.arange(24).reshape(4, 6).T
    for contiguous, expected in ((True, [4, 1]), (False, [1, 6])):
        (out,), _ = run("out0[0] = in0_strides[0]; out0[1] = in0_strides[1];", [a], [(2,)], [mx.int64], (1, 1, 1),
                        (1, 1, 1), ensure_row_contiguous=contiguous)  # fmt: skip
        assert out.tolist() == expected


def test_atomic_outputs_and_init_value():
    body = """
      uint i = thread_position_in_grid.x;
      atomic_fetch_add_explicit(&out0[i % 5], in0[i], memory_order_relaxed);
      atomic_fetch_max_explicit(&out1[0], (float)i, memory_order_relaxed);
    """
    a = mx.arange(1003).astype(mx.float32)
    (out, last), launch = run(body, [a], [(5,), (1,)], [mx.float32] * 2, (1003, 1, 1), (256, 1, 1), init_value=0,
                              atomic_outputs=True)  # fmt: skip
    assert not launch.report and launch.statistics.atomics == 2006
    assert out.tolist() == [float(sum(range(r, 1003, 5))) for r in range(5)] and last.item() == 1002


def test_ragged_last_threadgroup_and_clamped_threadgroup():
    body = "out0[thread_position_in_grid.x] = threads_per_threadgroup.x * 1000 + thread_position_in_threadgroup.x;"
    (out,), launch = run(body, [1.0], [(70,)], [mx.int32], (70, 1, 1), (32, 1, 1))
    assert (out[0].item(), out[63].item(), out[64].item(), out[69].item()) == (32000, 32031, 6000, 6005)
    (out,), launch = run(body, [1.0], [(5,)], [mx.int32], (5, 1, 1), (256, 1, 1))
    assert out.tolist() == [5000 + i for i in range(5)] and launch.statistics.threadgroups == 1


def test_output_without_init_value_is_uninitialised():
    _, launch = run("out0[thread_position_in_grid.x] += 1;", [1.0], [(4,)], [mx.float32], (4, 1, 1), (4, 1, 1))
    assert [f.kind for f in launch.report] == ["uninitialised-device"]
    (out,), launch = run("out0[thread_position_in_grid.x] += 1;", [1.0], [(4,)], [mx.float32], (4, 1, 1), (4, 1, 1),
                         init_value=2)  # fmt: skip
    assert not launch.report and out.tolist() == [3] * 4


def test_wrong_counts_are_refused_as_mlx_does():
    kernel = MetalKernel(Options(), "k", ["a", "b"], ["out"], "out[0] = a[0];")
    with pytest.raises(ValueError, match="Expected `inputs` to have size 2 but got size 1"):
        kernel(inputs=[mx.zeros(3)], output_shapes=[(1,)], output_dtypes=[mx.float32], grid=(1, 1, 1),
               threadgroup=(1, 1, 1))  # fmt: skip


def test_mlx_is_put_back():
    kept = mx.fast.metal_kernel, mx.metal.is_available
    with metal_on_cpu():
        assert mx.metal.is_available() and mx.fast.metal_kernel is not kept[0]
    assert (mx.fast.metal_kernel, mx.metal.is_available) == kept


def test_results_reach_mlx_in_their_type():
    (out,), _ = run("out0[thread_position_in_grid.x] = bfloat16_t(1.00390625f);", [1.0], [(3,)], [mx.bfloat16],
                    (3, 1, 1), (3, 1, 1))  # fmt: skip
    assert out.dtype == mx.bfloat16 and np.array(out.astype(mx.float32)).tolist() == [1.0] * 3
