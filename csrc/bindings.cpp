// The module qwen_metal._ext: what was built, a probe, and one init_<op> a file of csrc/.
// Python reaches it only through qwen_metal.extension.load(), which decides whether it may be used.
#include <nanobind/nanobind.h>
#include <nanobind/stl/variant.h>

#include "mlx/mlx.h"
#include "mlx/version.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

// An op adds `void init_<op>(nb::module_& m)` in its own csrc/<op>.cpp, one line here and one below.
void init_attention_prefill(nb::module_& m);
void init_attention_prepare(nb::module_& m);
void init_gated_delta_prepare(nb::module_& m);
void init_gated_delta_scan(nb::module_& m);
void init_gated_delta_step(nb::module_& m);
void init_gated_norm(nb::module_& m);
void init_gqa_decode(nb::module_& m);
void init_kv_append(nb::module_& m);
void init_cpu_features(nb::module_& m);
void init_primitive(nb::module_& m);
void init_threads(nb::module_& m);
void init_embed(nb::module_& m);
void init_projections(nb::module_& m);
void init_route_topk(nb::module_& m);
void init_route_plan(nb::module_& m);
void init_grouped_qmm(nb::module_& m);
void init_limits(nb::module_& m);
void init_moe_decode(nb::module_& m);

static nb::str dotted(int major, int minor, int patch) {
  return nb::str("{}.{}.{}").format(major, minor, patch);
}

static nb::dict build_info() {
  nb::dict d;
#if defined(__clang__)
  d["compiler"] = "clang " __clang_version__;
#else
  d["compiler"] = "gcc " __VERSION__;
#endif
  d["mlx"] = dotted(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH);
  d["nanobind"] = dotted(NB_VERSION_MAJOR, NB_VERSION_MINOR, NB_VERSION_PATCH);
  nb::list sets;
  for (auto name : nb::str(QWEN_METAL_SETS).attr("split")(",")) {
    if (nb::len(name) > 0) {
      sets.append(name);
    }
  }
  d["instruction_sets"] = sets;
  return d;
}

NB_MODULE(_ext, m) {
  m.attr("mlx_version") = dotted(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH);
  m.def("build_info", &build_info, "What this file was built with.");
  m.def(
      "probe",
      [](const mx::array& x, mx::StreamOrDevice s) { return mx::contiguous(x, false, s); },
      "x"_a,
      nb::kw_only(),
      "stream"_a = nb::none(),
      "x through one op: fails where the array type of this build and of mlx differ.");

  init_attention_prefill(m);
  init_attention_prepare(m);
  init_gated_delta_prepare(m);
  init_gated_delta_scan(m);
  init_gated_delta_step(m);
  init_gated_norm(m);
  init_gqa_decode(m);
  init_kv_append(m);
  init_cpu_features(m);
  init_primitive(m);
  init_threads(m);
  init_embed(m);
  init_projections(m);
  init_route_topk(m);
  init_route_plan(m);
  init_grouped_qmm(m);
  init_limits(m);
  init_moe_decode(m);
}
