// Sparse tensors of the devices: their parts are dense tensors of a device. Whatever computes with them waits for the current
// stream and is computed at once, because results' sizes depend on values.

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_embedding_bag_backward_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

#include "argument_tensors.h"
#include "host_view.h"
#include "streams.h"

namespace simulated {
namespace {

at::Tensor moved(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || !tensor.is_sparse()) {
    return tensor.defined() ? tensor.to(device) : tensor;
  }
  return at::_sparse_coo_tensor_unsafe(
      tensor._indices().to(device),
      tensor._values().to(device),
      tensor.sizes(),
      tensor.options().device(device),
      tensor.is_coalesced());
}

at::SparseTensorImpl* sparse_part(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

// Gives a tensor of a device the value that the host has computed.
void assign(const at::Tensor& tensor, const at::Tensor& host) {
  if (!tensor.is_sparse()) {
    tensor.copy_(host);
    return;
  }
  at::Tensor value = moved(host, tensor.device());
  auto* part = sparse_part(tensor);
  part->raw_resize_(value.sparse_dim(), value.dense_dim(), value.sizes());
  part->set_indices_and_values_unsafe(value._indices(), value._values());
  part->set_coalesced(value.is_coalesced());
}

void compute_at_once(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(current_device()));
  auto inputs = with_tensors(arguments, [&](const at::Tensor& tensor) {
    if (!is_on_device(tensor)) {
      return tensor;
    }
    device = tensor.device();
    return moved(tensor, at::kCPU);
  });
  for (c10::IValue& input : inputs) {
    if (input.isDevice()) {
      input = c10::Device(at::kCPU);
    }
  }
  auto results = inputs;
  op.callBoxed(results);
  for (size_t number = 0; number < arguments.size(); ++number) {
    const auto* info = schema.arguments()[number].alias_info();
    if (info != nullptr && info->isWrite() && arguments[number].isTensor()) {
      assign(arguments[number].toTensor(), inputs[number].toTensor());
    }
  }
  for (size_t number = 0; number < results.size(); ++number) {
    int written = written_argument(schema, number);
    auto move = [&](const at::Tensor& tensor) { return moved(tensor, device); };
    stack->push_back(written >= 0 ? arguments[written] : with_tensors(results[number], move));
  }
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_at_once>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // Its result may be sparse, which is not known from the arguments' shapes.
  library.impl("_embedding_bag_backward", &at::native::_embedding_bag_backward_symint);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("sparse_dim", &at::native::sparse_dim_sparse);
  library.impl("dense_dim", &at::native::dense_dim_sparse);
  library.impl("_nnz", &at::native::_nnz_sparse);
  library.impl("is_coalesced", &at::native::is_coalesced_sparse);
  library.impl("_coalesced_", &at::native::_coalesced_sparse_);
  library.impl("_indices", &at::native::_indices_sparse);
  library.impl("_values", &at::native::_values_sparse);
  library.impl("indices", &at::native::indices_sparse);
  library.impl("values", &at::native::values_sparse);
  // Those that torch has for every device take a sparse tensor's memory for a dense one's.
  library.impl("clone", torch::CppFunction::makeFromBoxedFunction<&compute_at_once>());
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&compute_at_once>());
}

}  // namespace
}  // namespace simulated
