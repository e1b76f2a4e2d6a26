// Operators without a kernel of their own: the CPU kernel runs on zero-copy aliases of the device's
// tensors.
#pragma once

#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
}

namespace sim {

void cpu_kernel(const c10::OperatorHandle&, torch::jit::Stack*);         // dense
void sparse_cpu_kernel(const c10::OperatorHandle&, torch::jit::Stack*);  // sparse COO operands
// Kernels that only handle metadata, run on the device tensor itself: views, set_, the parts of a
// sparse tensor.
void dense_as_is(const c10::OperatorHandle&, torch::jit::Stack*);
void sparse_as_is(const c10::OperatorHandle&, torch::jit::Stack*);

void watch_the_host();  // report CPU operators that touch memory a stream may still be using

}  // namespace sim
