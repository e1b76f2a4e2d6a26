#include "alias.h"

#include <c10/core/TensorImpl.h>

namespace sim {

using at::Tensor;

int& InsideKernel::depth() {
  static thread_local int depth = 0;
  return depth;
}

Tensor over(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(key), like.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      like.storage_offset());
  return result;
}

Tensor cpu_alias(const Tensor& device_tensor) {
  auto* keep = new c10::Storage(device_tensor.storage());
  const auto let_go = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr pointer(const_cast<void*>(keep->data()), keep, let_go, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t{}, keep->nbytes(), std::move(pointer), nullptr,
                       false);
  auto alias = over(std::move(storage), device_tensor, c10::DispatchKey::CPU);
  alias._set_conj(device_tensor.is_conj());
  alias._set_neg(device_tensor.is_neg());
  return alias;
}

namespace {
struct Adopted {
  c10::Storage cpu;
  const void* memory;
  int device;
};
void release_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  if (adopted->memory) discount(adopted->memory, adopted->cpu.nbytes(), adopted->device);
  delete adopted;
}
}  // namespace

Tensor adopt(const Tensor& cpu_tensor, int device) {
  auto* adopted = new Adopted{cpu_tensor.storage(), cpu_tensor.storage().data(), device};
  const size_t bytes = adopted->cpu.nbytes();
  if (adopted->memory) account(adopted->memory, bytes, device);
  c10::DataPtr pointer(const_cast<void*>(adopted->memory), adopted, &release_adopted,
                       c10::Device(SIM, static_cast<c10::DeviceIndex>(device)));
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes, std::move(pointer),
                       &device_allocator(), true);
  return over(std::move(storage), cpu_tensor, c10::DispatchKey::PrivateUse1);
}

Use use_of(const Tensor& tensor, bool write) {
  const auto base = reinterpret_cast<uintptr_t>(tensor.storage().data());
  if (base == 0 || tensor.numel() == 0) return {0, 0, write};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto item = static_cast<int64_t>(tensor.dtype().itemsize());
  const auto low = base + static_cast<uintptr_t>(tensor.storage_offset() * item);
  return {low, low + static_cast<uintptr_t>((last + 1) * item), write};
}

}  // namespace sim
