// Under autocast the products of matrices and the convolutions are computed with short numbers.

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "argument_tensors.h"
#include "host_view.h"

namespace simulated {
namespace {

void with_short_numbers(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  auto dtype = at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1);
  auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  auto shortened = with_tensors(arguments, [dtype](const at::Tensor& tensor) {
    return is_on_device(tensor) && tensor.is_floating_point() ? tensor.to(dtype) : tensor;
  });
  op.callBoxed(shortened);
  stack->insert(stack->end(), shortened.begin(), shortened.end());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : {"addmm", "bmm", "conv1d", "conv2d", "linear", "matmul", "mm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&with_short_numbers>());
  }
}

}  // namespace
}  // namespace simulated
