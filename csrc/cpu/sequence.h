// The kernels of the ops along a sequence (Gated DeltaNet, attention), one table an
// instruction set; sequence_<set>.cpp defines each from the same templates.
#pragma once

#include "cpu/attention_prefill.h"
#include "cpu/attention_prepare.h"
#include "cpu/gated_delta_step.h"

namespace qwen_metal {

struct SequenceKernels {
  void (*to_float)(const void* from, Float type, size_t count, float* to);
  void (*from_float)(const float* from, size_t count, Float type, void* to);

  void (*scan)(const ScanHead& head, float* scratch);
  int64_t (*scan_scratch)(int tokens, int Dk);
  void (*scan_token)(
      const float* q, const float* k, const float* v, float g, float beta, const float* state_in,
      float* state_out, int Dk, int Dv, float* y);
  void (*prepare)(const PrepareRow& row, int first, int last);
  void (*step)(const StepRow& row, int key_head, float* scratch);
  void (*gated_norm)(float* y, float* z, const float* weight, int count, float eps);

  void (*prepare_head)(const RopeToken& rope, const float* weight, float eps, float* x);
  void (*decode)(const DecodePart& part, float* scratch);
  void (*combine_parts)(
      const float* sums, const float* most, const float* weight, int parts, int64_t stride,
      int64_t number_stride, int D, HeadGate gate, float* o, float* scratch);
  void (*prefill)(const PrefillBlock& block, float* scratch);
  int64_t (*prefill_scratch)(int rows, int D);
};

extern const SequenceKernels sequence_portable, sequence_neon, sequence_avx2, sequence_avx512;

namespace {

// What the including file, compiled for one instruction set, offers.
constexpr SequenceKernels sequence_kernels = {
    &to_float,     &from_float, &scan,          &scan_scratch, &scan_token,      &prepare,
    &step,         &gated_norm_row, &prepare_head, &decode,    &combine_parts,   &prefill,
    &prefill_scratch,
};

}  // namespace
}  // namespace qwen_metal
