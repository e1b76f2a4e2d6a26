#include "autocast.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "alias.h"

// From <ATen/autocast_mode.h>, which would bring in every operator of ATen.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
}  // namespace at::autocast

namespace sim {

const char* const LOWER_PRECISION[] = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "linear", "matmul", "mm", "mv", "bmm", "addmm",
    "addmv", "addbmm", "baddbmm", "addr", "prelu", "chain_matmul", "linalg_multi_dot",
    "scaled_dot_product_attention", nullptr};
const char* const FLOAT32[] = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm",
    "cosine_similarity", "poisson_nll_loss", "nll_loss", "nll_loss2d", "cosine_embedding_loss",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "prod.dim_int",
    "cumsum", "cumprod", "norm.Scalar", nullptr};
const char* const WIDEST[] = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "cat", "stack", "vdot", nullptr};

namespace {

using at::Tensor;
using torch::jit::Stack;

bool eligible(const Tensor& t) {
  return on_device(t) && t.is_floating_point() && t.scalar_type() != at::kDouble;
}

template <class Visit>
void each_argument(const c10::OperatorHandle& op, Stack* stack, const Visit& visit) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) visit((*stack)[i]);
}

void cast_arguments(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  const auto cast = [&](const Tensor& t) {
    return eligible(t) ? at::autocast::cached_cast(dtype, t, SIM) : t;
  };
  each_argument(op, stack, [&](c10::IValue& value) {
    if (value.isTensor()) {
      value = cast(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> casted;
      for (const auto& t : value.toTensorVector()) casted.push_back(cast(t));
      value = casted;
    }
  });
}

at::ScalarType widest_of(const c10::OperatorHandle& op, Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(SIM);
  const auto see = [&](const Tensor& t) {
    if (eligible(t) && t.scalar_type() == at::kFloat) widest = at::kFloat;
  };
  each_argument(op, stack, [&](const c10::IValue& value) {
    if (value.isTensor()) see(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) see(t);
  });
  return widest;
}

void run(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  cast_arguments(op, stack, dtype);
  op.callBoxed(stack);
}

}  // namespace

void in_lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, at::autocast::get_autocast_dtype(SIM));
}
void in_float32(const c10::OperatorHandle& op, Stack* stack) { run(op, stack, at::kFloat); }
void in_widest(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, widest_of(op, stack));
}

}  // namespace sim
