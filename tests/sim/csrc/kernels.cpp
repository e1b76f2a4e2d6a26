#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>

#include "alias.h"
#include "fallback.h"

namespace sim {
namespace {

constexpr c10::DispatchKeySet DENSE{c10::DispatchKey::PrivateUse1};

c10::Device chosen(std::optional<c10::Device> device) {
  const auto index = device ? index_or_current(*device) : current_device();
  check_index(index);
  return c10::Device(SIM, index);
}

torch::jit::Stack call(const char* name, torch::jit::Stack stack) {
  cpu_kernel(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
  return stack;
}

}  // namespace

// ---- making

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(size, &device_allocator(), DENSE, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), DENSE,
                                           c10::dtype_or_default(dtype));
}

// ---- copying

namespace {

// Between devices a copy runs on the source's stream, fenced both ways with the target's, as CUDA's
// does.
void launch_between_devices(const Tensor& source, const Tensor& target) {
  const auto from = current_stream(source.device().index()),
             to = current_stream(target.device().index());
  checker().wait(from, checker().record(to));
  checker().launch(from, "copy to device", {use_of(source, false), use_of(target, true)});
  checker().wait(to, checker().record(from));
}

// Only a non-blocking copy with pinned memory returns before it is done.
void launch_with_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool to_host = on_device(source);
  const auto stream = current_stream((to_host ? source : target).device().index());
  checker().launch(stream, to_host ? "copy to host" : "copy from host",
                   {use_of(source, false), use_of(target, true)});
  const bool pinned = checker().is_pinned((to_host ? target : source).storage().data());
  if (!(non_blocking && pinned)) checker().synchronize(stream);
}

}  // namespace

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool from_device = on_device(source), to_device = on_device(target);
  if (!from_device || !to_device)
    launch_with_host(source, target, non_blocking);
  else if (source.device() != target.device())
    launch_between_devices(source, target);
  else
    checker().launch(current_stream(source.device().index()), "copy",
                     {use_of(source, false), use_of(target, true)});
  InsideKernel inside;
  (to_device ? cpu_alias(target) : target).copy_(from_device ? cpu_alias(source) : source);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void record_stream(Tensor& tensor, at::Stream stream) {
  device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

// ---- operators that torch gives no CPU kernel, or one that draws from the wrong generator

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0)
    return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  return call("aten::convolution",
              {input, weight, bias, stride, padding, dilation, transposed, output_padding, groups})
      .back()
      .toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> output_mask) {
  c10::IValue bias_sizes;
  if (output_mask[2])
    bias_sizes = std::vector<int64_t>{transposed ? weight.size(1) * groups : weight.size(0)};
  auto results =
      call("aten::convolution_backward",
           {grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed,
            output_padding, groups, std::vector<bool>(output_mask.begin(), output_mask.end())});
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
}

// ---- kernels written in Python

void kernel_begin(std::string name, at::TensorList reads, at::TensorList writes) {
  std::vector<Use> uses;
  int device = current_device();
  for (const auto& [tensors, write] : {std::pair(reads, false), std::pair(writes, true)})
    for (const auto& t : tensors) {
      device = t.device().index();
      uses.push_back(use_of(t, write));
    }
  checker().launch(current_stream(device), name, uses);
  ++InsideKernel::depth();
}

void kernel_end() { --InsideKernel::depth(); }

Tensor view_on_cpu(const Tensor& tensor) { return cpu_alias(tensor); }

}  // namespace sim
