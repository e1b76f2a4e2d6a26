// Everything that torch is told: kernels for the device, and the operators `torch.ops.sim.*` that
// tests use.
#include <torch/library.h>

#include "alias.h"
#include "autocast.h"
#include "fallback.h"
#include "kernels.h"
#include "runtime.h"

namespace {

using torch::CppFunction;
template <c10::KernelFunction::BoxedKernelFunction* kernel>
void implement(torch::Library& library, std::initializer_list<const char*> names) {
  for (const char* name : names) library.impl(name, CppFunction::makeFromBoxedFunction<kernel>());
}
template <c10::KernelFunction::BoxedKernelFunction* kernel>
void implement_all(torch::Library& library, const char* const* names) {
  for (; *names; ++names) library.impl(*names, CppFunction::makeFromBoxedFunction<kernel>());
}

c10::Dict<std::string, int64_t> op_counts(int64_t device) {
  sim::check_index(device);
  c10::Dict<std::string, int64_t> counts;
  for (const auto& [op, count] : sim::checker().op_counts(static_cast<int>(device)))
    counts.insert(op, count);
  return counts;
}
at::Generator default_generator(int64_t device) {
  sim::check_index(device);
  return sim::default_generator(static_cast<c10::DeviceIndex>(device));
}

}  // namespace

TORCH_LIBRARY(sim, m) {
  m.def("set_device_count(int count) -> ()", &sim::set_device_count);
  m.def("default_generator(int device) -> Generator?", &default_generator);
  m.def("watch_the_host() -> ()", &sim::watch_the_host);

  m.def("hazards(bool clear) -> str[]", [](bool clear) { return sim::checker().hazards(clear); });
  m.def("raise_at_hazard(bool on) -> ()", [](bool on) { sim::checker().raise_at_hazard(on); });
  m.def("leave_out(str kind, bool on) -> ()", &sim::leave_out);
  m.def("op_counts(int device) -> Dict(str, int)", &op_counts);
  m.def("thread_count(int device) -> int",
        [](int64_t d) { return sim::checker().thread_count(static_cast<int>(d)); });
  m.def("forget_counts() -> ()", [] { sim::checker().forget_counts(); });

  m.def("kernel_begin(str name, Tensor[] reads, Tensor[] writes) -> ()", &sim::kernel_begin);
  m.def("kernel_end() -> ()", &sim::kernel_end);
  m.def("view_on_cpu(Tensor t) -> Tensor");
  m.def("host_reads(Tensor t) -> ()",
        [](const at::Tensor&) {});  // an operator like any other: the host watch sees it
}
TORCH_LIBRARY_IMPL(sim, PrivateUse1, m) { m.impl("view_on_cpu", &sim::view_on_cpu); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(CppFunction::makeFromBoxedFunction<&sim::cpu_kernel>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &sim::empty);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("_copy_from", &sim::copy_from);
  m.impl("_copy_from_and_resize", &sim::copy_from_and_resize);
  m.impl("record_stream", &sim::record_stream);
  m.impl("native_dropout", &sim::native_dropout);
  m.impl("convolution_overrideable", &sim::convolution);
  m.impl("convolution_backward_overrideable", &sim::convolution_backward);
  implement<&sim::dense_as_is>(
      m, {"as_strided", "view", "_reshape_alias", "unfold", "resize_", "set_.source_Tensor",
          "set_.source_Storage", "set_.source_Storage_storage_offset"});
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(CppFunction::makeFromBoxedFunction<&sim::sparse_cpu_kernel>());
}
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  implement<&sim::sparse_as_is>(
      m, {"_indices", "_values", "indices", "values", "_nnz", "_dimI", "_dimV", "sparse_dim",
          "dense_dim", "is_coalesced", "_coalesced_", "_sparse_coo_tensor_with_dims",
          "_sparse_coo_tensor_with_dims_and_tensors", "sparse_resize_", "sparse_resize_and_clear_",
          "copy_sparse_to_sparse_", "copy_", "clone", "empty.memory_format"});
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  implement_all<&sim::in_lower_precision>(m, sim::LOWER_PRECISION);
  implement_all<&sim::in_float32>(m, sim::FLOAT32);
  implement_all<&sim::in_widest>(m, sim::WIDEST);
}

// A copy takes conjugated and negated sources as they are: the CPU's copy resolves the bits.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", CppFunction::makeFallthrough()); }
