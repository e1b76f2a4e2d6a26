// Operators with a kernel of their own: making and copying tensors, and the few that have no CPU
// twin.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace sim {

using at::Tensor;

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType>, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool> pin_memory,
             std::optional<at::MemoryFormat>);
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType>,
                     std::optional<at::Layout>, std::optional<at::Device>,
                     std::optional<bool> pin_memory);
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking);
Tensor copy_from_and_resize(const Tensor& source, const Tensor& target);
void record_stream(Tensor&, at::Stream);
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train);

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   bool transposed, at::IntArrayRef output_padding, int64_t groups);
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> output_mask);

// For kernels written in Python: between begin and end, this thread works on `kernel_view`s inside
// one launch.
void kernel_begin(std::string name, at::TensorList reads, at::TensorList writes);
void kernel_end();
Tensor view_on_cpu(const Tensor&);

}  // namespace sim
