#include "fallback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/copy_sparse_to_sparse.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <unordered_set>

#include "alias.h"

namespace sim {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

bool is_write(const c10::AliasInfo* alias) { return alias && alias->isWrite(); }
std::string full_name(const c10::FunctionSchema& schema) {
  return schema.overload_name().empty() ? schema.name()
                                        : schema.name() + "." + schema.overload_name();
}

// The size or value of the result depends on data, so a real device makes the host wait for the
// stream.
bool blocks_the_host(const std::string& name) {
  static const std::unordered_set<std::string> names{"aten::_local_scalar_dense",
                                                     "aten::equal",
                                                     "aten::is_nonzero",
                                                     "aten::nonzero",
                                                     "aten::masked_select",
                                                     "aten::_unique2",
                                                     "aten::unique_dim",
                                                     "aten::unique_consecutive",
                                                     "aten::bincount",
                                                     "aten::_coalesce",
                                                     "aten::repeat_interleave"};
  return names.count(name) > 0;
}

constexpr auto MIXED =
    "Expected all tensors to be on the same device, but found at least two devices, sim:";

// One call on its way down to the CPU kernel and back up.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), count_(schema_.arguments().size()),
        base_(stack->size() - count_), originals_(torch::jit::last(*stack, count_).vec()) {}

  void run(DispatchKey key) {
    lend_arguments();
    choose_device();
    lend_generators();
    checker().launch(current_stream(device_), full_name(schema_), uses_);
    {
      InsideKernel inside;
      op_.redispatchBoxed(DispatchKeySet(key), &stack_);
    }
    hand_back_arguments();
    adopt_results();
    if (blocks_the_host(schema_.name())) checker().synchronize(current_stream(device_));
  }

 private:
  void lend_arguments() {
    for (size_t i = 0; i < count_; ++i) {
      const auto& argument = schema_.arguments()[i];
      const bool write = is_write(argument.alias_info());
      const bool may_be_cpu =
          argument.name() == "indices";  // x[i] takes CPU indices on real devices too
      auto& value = stack_[base_ + i];
      if (value.isTensor()) {
        value = write ? lend_output(i, originals_[i].toTensor())
                      : lend(originals_[i].toTensor(), false, may_be_cpu);
      } else if (value.isTensorList()) {
        c10::List<Tensor> lent;
        for (const auto& t : originals_[i].toTensorVector())
          lent.push_back(lend(t, write, may_be_cpu));
        value = lent;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> lent;
        for (const auto& t : originals_[i].toOptionalTensorVector())
          lent.push_back(t ? std::optional<Tensor>(lend(*t, write, may_be_cpu)) : std::nullopt);
        value = lent;
      } else if (value.isDevice() && value.toDevice().type() == SIM) {
        settle_on(index_or_current(value.toDevice()));
        value = c10::Device(c10::kCPU);
      }
    }
  }

  Tensor lend(const Tensor& t, bool write, bool may_be_cpu) {
    if (!t.defined()) return t;
    if (!on_device(t)) {
      if (t.is_cpu() && t.dim() > 0 && !may_be_cpu) cpu_operand_ = true;
      return t;
    }
    settle_on(t.device().index());
    if (t.is_sparse()) return lend_sparse(t, write);
    uses_.push_back(use_of(t, write));
    lent_[t.storage().data()] = t.storage();
    return cpu_alias(t);
  }

  Tensor lend_sparse(const Tensor& t, bool write) {
    const Tensor indices = lend(t._indices(), write, false),
                 values = lend(t._values(), write, false);
    InsideKernel inside;
    return at::_sparse_coo_tensor_unsafe(indices, values, t.sizes(), std::nullopt, std::nullopt,
                                         std::nullopt, std::nullopt, t.is_coalesced());
  }

  // An empty `out=` is sized by the kernel, which must not resize an alias: give it a tensor of its
  // own.
  Tensor lend_output(size_t i, const Tensor& t) {
    if (!on_device(t) || t.is_sparse() || t.numel() > 0 || t.storage().nbytes() > 0)
      return lend(t, true, false);
    settle_on(t.device().index());
    InsideKernel inside;
    return fresh_[i] = at::empty({0}, t.options().device(c10::kCPU));
  }

  void settle_on(int device) {
    check_index(device);
    if (device_ < 0) device_ = device;
    TORCH_CHECK(device == device_, MIXED, device_, " and sim:", device, "! (", full_name(schema_),
                ")");
  }

  void choose_device() {
    if (device_ < 0) device_ = current_device();
    TORCH_CHECK(!cpu_operand_, MIXED, device_, " and cpu! (", full_name(schema_), ")");
  }

  void lend_generators() {
    for (size_t i = 0; i < count_; ++i) {
      if (schema_.arguments()[i].type()->str().rfind("Generator", 0) != 0) continue;
      auto& value = stack_[base_ + i];
      const auto index = static_cast<c10::DeviceIndex>(device_);
      value = cpu_generator(value.isNone() ? default_generator(index) : value.toGenerator());
    }
  }

  void hand_back_arguments() {
    for (auto& [i, tensor] : fresh_)
      if (tensor.numel()) {
        auto out = originals_[i].toTensor();
        out.set_(reclaim(tensor));
      }
  }

  void adopt_results() {
    const size_t results = schema_.returns().size(), first = stack_.size() - results;
    for (size_t r = 0; r < results; ++r) {
      auto& value = stack_[first + r];
      if (const auto* written = argument_returned_by(schema_.returns()[r])) {
        if (written->isTensor() && written->toTensor().is_sparse())
          write_back_sparse(written->toTensor(), value.toTensor());
        value = *written;
      } else if (value.isTensor()) {
        value = reclaim(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> reclaimed;
        for (const auto& t : value.toTensorVector()) reclaimed.push_back(reclaim(t));
        value = reclaimed;
      }
    }
  }

  // In-place and out= operators return the very tensor they were given.
  const IValue* argument_returned_by(const c10::Argument& result) {
    if (!is_write(result.alias_info())) return nullptr;
    for (size_t i = 0; i < count_; ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      if (alias && *alias == *result.alias_info()) return &originals_[i];
    }
    return nullptr;
  }

  Tensor reclaim(const Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    if (t.is_sparse()) return reclaim_sparse(t);
    if (auto known = lent_.find(t.storage().data()); known != lent_.end() && known->first)
      return over(known->second, t, DispatchKey::PrivateUse1);
    auto adopted = adopt(t, device_);
    lent_[adopted.storage().data()] = adopted.storage();  // two results may share one storage
    checker().result(current_stream(device_), full_name(schema_), use_of(adopted, true));
    return adopted;
  }

  Tensor reclaim_sparse(const Tensor& t) {
    Tensor indices, values;
    {
      InsideKernel inside;
      indices = t._indices(), values = t._values();
    }
    return at::_sparse_coo_tensor_unsafe(reclaim(indices), reclaim(values), t.sizes(), std::nullopt,
                                         std::nullopt, std::nullopt, std::nullopt,
                                         t.is_coalesced());
  }

  void write_back_sparse(Tensor target, const Tensor& result) {
    at::copy_sparse_to_sparse_(target, reclaim_sparse(result));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const size_t count_, base_;
  const std::vector<IValue> originals_;
  int device_ = -1;
  bool cpu_operand_ = false;
  std::vector<Use> uses_;
  std::map<const void*, c10::Storage> lent_;
  std::map<size_t, Tensor> fresh_;
};

c10::Device device_of_arguments(const c10::OperatorHandle& op, const Stack& stack) {
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor() && on_device(value.toTensor())) return value.toTensor().device();
    if (value.isDevice() && value.toDevice().type() == SIM && value.toDevice().index() >= 0)
      return value.toDevice();
  }
  return c10::Device(SIM, current_device());
}

void as_is(const c10::OperatorHandle& op, Stack* stack, DispatchKey key) {
  c10::DeviceGuard guard(device_of_arguments(op, *stack));
  op.redispatchBoxed(DispatchKeySet(key), stack);
}

}  // namespace

void cpu_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run(DispatchKey::CPU);
}
void sparse_cpu_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run(DispatchKey::SparseCPU);
}
void dense_as_is(const c10::OperatorHandle& op, Stack* stack) {
  as_is(op, stack, DispatchKey::CPU);
}
void sparse_as_is(const c10::OperatorHandle& op, Stack* stack) {
  as_is(op, stack, DispatchKey::SparseCPU);
}

}  // namespace sim
