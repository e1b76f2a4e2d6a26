// Mixed precision: which operators run in lower precision, which in float32, which in the widest
// type they are given.
#pragma once

#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
}

namespace sim {

extern const char* const LOWER_PRECISION[];
extern const char* const FLOAT32[];
extern const char* const WIDEST[];

void in_lower_precision(const c10::OperatorHandle&, torch::jit::Stack*);
void in_float32(const c10::OperatorHandle&, torch::jit::Stack*);
void in_widest(const c10::OperatorHandle&, torch::jit::Stack*);

}  // namespace sim
