// The operators that make, reshape and copy tensors of the devices. All others are in fallback.cpp.

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "host_view.h"
#include "memory.h"

namespace simulated {

at::Tensor host_view(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Stream& current_stream_of(const at::Tensor& tensor) {
  return current_stream(tensor.device().index());
}

namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> device) {
  auto found = device.value_or(c10::Device(c10::DeviceType::PrivateUse1));
  return found.has_index() ? found : c10::Device(found.type(), static_cast<c10::DeviceIndex>(current_device()));
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), KEYS, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  size_t needed = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  tensor->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    tensor->empty_tensor_restride(*format);
  }
  return self;
}

void copy_on_stream(const at::Tensor& to, const at::Tensor& from) {
  // A dispatch key for gradients or views would do nothing useful below the operator that is under way.
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

// Copies between two devices are ordered after the work on the current streams of both, and before what follows there.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  Stream& sender = current_stream_of(from);
  Stream& receiver = current_stream_of(to);
  if (&sender != &receiver) {
    sender.wait_for(receiver.mark());
  }
  sender.submit([to = host_view(to), from = host_view(from)] { copy_on_stream(to, from); });
  if (&sender != &receiver) {
    receiver.wait_for(sender.mark());
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  TORCH_CHECK(
      at::is_expandable_to(self.sizes(), to.sizes()), "sizes ", self.sizes(), " cannot be copied to ", to.sizes());
  if (is_on_device(self) && is_on_device(to)) {
    copy_between_devices(self, to);
    return to;
  }
  const at::Tensor& host = is_on_device(self) ? to : self;
  Stream& stream = current_stream_of(is_on_device(self) ? self : to);
  // The task keeps the host's memory, as CUDA's allocator for pinned memory does.
  Task task = [to = host_view(to), from = host_view(self), kept = host.storage()] { copy_on_stream(to, from); };
  if (non_blocking) {
    stream.submit_late(std::move(task));
  } else {
    stream.submit(std::move(task));
    stream.synchronize();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) {
    resize_(to, self.sizes(), std::nullopt);
  }
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  current_stream_of(self).synchronize();
  return at::native::_local_scalar_dense_cpu(host_view(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr(), stream.id());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &at::native::set_cpu_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("record_stream", &record_stream);
}

}  // namespace
}  // namespace simulated
