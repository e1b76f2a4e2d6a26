// Zero-copy passage between the device and the CPU kernels that do its work.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime.h"

namespace sim {

inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == SIM; }

// A CPU tensor over the same memory; keeps the device tensor's storage alive.
at::Tensor cpu_alias(const at::Tensor& device_tensor);
// A device tensor over what a CPU kernel allocated; accounted to the device and to its current
// stream.
at::Tensor adopt(const at::Tensor& cpu_tensor, int device);
// A tensor over `storage` with the geometry of `like`.
at::Tensor over(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key);
// The bytes between the first and the last element.
Use use_of(const at::Tensor&, bool write);

// While one exists on a thread, CPU operators there are the inside of a kernel and not the host's
// own accesses.
class InsideKernel {
 public:
  InsideKernel() { ++depth(); }
  ~InsideKernel() { --depth(); }
  InsideKernel(const InsideKernel&) = delete;
  InsideKernel& operator=(const InsideKernel&) = delete;
  static int& depth();
};

}  // namespace sim
