// The host's own accesses: CPU operators on pinned memory (or on a host view of device memory) that
// a stream may still be reading or writing. Seen through torch's profiling hook, which shows every
// operator's inputs.
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include "alias.h"
#include "fallback.h"

namespace sim {
namespace {

using at::Tensor;

template <class Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorVector()) visit(t);
  } else if (value.isOptionalTensorList()) {
    for (const auto& t : value.toOptionalTensorVector())
      if (t) visit(*t);
  }
}

bool watched(const Tensor& t) {
  return t.defined() && t.is_cpu() && t.layout() == c10::kStrided && t.has_storage() &&
         t.numel() > 0 && checker().knows(t.storage().data());
}

// An operator with a device among its arguments is a copy or a kernel; the device's side reports
// its accesses.
bool is_device_operator(c10::ArrayRef<const c10::IValue> inputs) {
  bool found = false;
  for (const auto& value : inputs) {
    if (value.isDevice() && value.toDevice().type() == SIM) return true;
    each_tensor(value, [&](const Tensor& t) { found |= on_device(t); });
  }
  return found;
}

bool only_metadata(const std::string& name) {
  return name.find("_like") != std::string::npos || name.rfind("aten::new_", 0) == 0 ||
         name == "aten::is_pinned" || name == "aten::is_same_size" || name == "aten::record_stream";
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  if (InsideKernel::depth() > 0) return nullptr;
  const auto inputs = function.inputs();
  bool any = false;
  for (const auto& value : inputs) each_tensor(value, [&](const Tensor& t) { any |= watched(t); });
  if (!any || is_device_operator(inputs)) return nullptr;
  const auto schema = function.operator_schema();
  if (!schema || only_metadata(schema->name())) return nullptr;

  std::vector<Use> uses;
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); ++i) {
    const auto* alias = schema->arguments()[i].alias_info();
    if (alias && !alias->isWrite()) continue;  // a view: no bytes are touched yet
    each_tensor(inputs[i], [&](const Tensor& t) {
      if (watched(t)) uses.push_back(use_of(t, alias != nullptr));
    });
  }
  if (!uses.empty()) checker().host_access(schema->name(), uses);
  return nullptr;
}

}  // namespace

void watch_the_host() {
  static const bool once = [] {
    at::addGlobalCallback(at::RecordFunctionCallback(&before_operator)
                              .needsInputs(true)
                              .scopes({at::RecordScope::FUNCTION}));
    return true;
  }();
  (void)once;
}

}  // namespace sim
