// Every operator that has no kernel of its own. It is a task of the current stream, in which the host computes it.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "argument_tensors.h"
#include "host_view.h"

namespace simulated {
namespace {

using Operator = c10::OperatorHandle;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

// Returns whether the results' shapes can be known before the operator is computed, and no result is a view of an argument.
bool may_be_a_task(const Operator& op) {
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    return false;
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    // The host draws random numbers from the same generator, and their order must be the program's.
    return false;
  }
  if (op.schema().name() == "aten::_embedding_bag" || op.schema().name() == "aten::_embedding_bag_forward_only") {
    // On the host some results have other shapes than torch says.
    return false;
  }
  for (const c10::Argument& result : op.schema().returns()) {
    bool is_view = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    if (result.type()->kind() != c10::TypeKind::TensorType || is_view) {
      return false;
    }
  }
  return true;
}

// The device of the arguments, or nothing if it is not the devices' tensors that say where the operator is computed.
std::optional<c10::Device> device_of(const torch::jit::Stack& arguments) {
  std::optional<c10::Device> found;
  bool names_device = false;
  auto look = [&](const at::Tensor& tensor) {
    if (is_on_device(tensor)) {
      TORCH_CHECK(
          !found.has_value() || *found == tensor.device(),
          "tensors are on ", *found, " and ", tensor.device(), ", and must be on one device");
      found = tensor.device();
    }
    return tensor;
  };
  for (const c10::IValue& argument : arguments) {
    names_device = names_device || argument.isDevice();
    with_tensors(argument, look);
  }
  return names_device ? std::nullopt : found;
}

at::Tensor without_memory(const at::Tensor& tensor) {
  if (!is_on_device(tensor) && tensor.dim() == 0) {
    // Types of results depend on whether a tensor is a number of the host.
    return tensor;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

// What a task computes with: memory of the device, or the value that a host's tensor has now.
at::Tensor for_task(const at::Tensor& tensor) {
  if (is_on_device(tensor)) {
    return host_view(tensor);
  }
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

// Runs the operator without memory, to learn the shapes of its results. Returns false if torch cannot do so.
bool find_shapes(const Operator& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  try {
    op.callBoxed(stack);
    return true;
  } catch (const std::exception&) {
    // If the arguments are wrong, the operator itself says so when the host computes it at once.
    return false;
  }
}

// Gives each tensor that the operator writes to the shape that it has afterwards.
void resize_written(const Operator& op, const torch::jit::Stack& arguments, const torch::jit::Stack& shaped) {
  for (size_t number = 0; number < arguments.size(); ++number) {
    const auto* info = op.schema().arguments()[number].alias_info();
    if (info != nullptr && info->isWrite() && arguments[number].isTensor() && arguments[number].toTensor().defined()) {
      const at::Tensor& tensor = arguments[number].toTensor();
      auto sizes = shaped[number].toTensor().sizes();
      if (tensor.sizes() != sizes) {
        tensor.resize_(sizes);
      }
    }
  }
}

bool submit_as_task(const Operator& op, torch::jit::Stack* stack) {
  if (!may_be_a_task(op)) {
    return false;
  }
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  auto device = device_of(arguments);
  if (!device.has_value()) {
    return false;
  }
  auto shaped = with_tensors(arguments, without_memory);
  auto shapes = shaped;
  if (!find_shapes(op, shapes)) {
    return false;
  }
  c10::DeviceGuard guard(*device);
  resize_written(op, arguments, shaped);
  torch::jit::Stack results;
  std::vector<at::Tensor> made;
  for (size_t number = 0; number < shapes.size(); ++number) {
    int written = written_argument(op.schema(), number);
    const at::Tensor& shape = shapes[number].toTensor();
    made.emplace_back();
    if (written >= 0) {
      results.push_back(arguments[written]);
    } else if (!shape.defined()) {
      results.push_back(at::Tensor());
    } else {
      auto options = at::TensorOptions().dtype(shape.scalar_type()).device(*device);
      at::Tensor result = at::empty_strided(shape.sizes(), shape.strides(), options);
      made.back() = host_view(result);
      results.push_back(std::move(result));
    }
  }
  current_stream(device->index()).submit([op, made, inputs = with_tensors(arguments, for_task)]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    try {
      op.callBoxed(inputs);
      for (size_t number = 0; number < made.size(); ++number) {
        if (made[number].defined()) {
          made[number].copy_(inputs[number].toTensor());
        }
      }
    } catch (c10::Error& error) {
      error.add_context("the operator is " + op.schema().name());
      throw;
    }
  });
  torch::jit::drop(*stack, arguments.size());
  stack->insert(stack->end(), results.begin(), results.end());
  return true;
}

void compute(const Operator& op, torch::jit::Stack* stack) {
  if (!submit_as_task(op, stack)) {
    // This waits for the current stream, and a view that is not one would be a mistake.
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  }
}

Operator operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const Operator&, torch::jit::Stack* stack) {
  static const auto op = operator_named("aten::convolution");
  compute(op, stack);
}

void convolution_backward(const Operator&, torch::jit::Stack* stack) {
  static const auto op = operator_named("aten::convolution_backward");
  // The host's operator also has the bias's sizes as an argument, after gradient, input and weight.
  constexpr size_t ARGUMENTS = 10, WEIGHT = 2, TRANSPOSED = 6, GROUPS = 8;
  auto arguments = torch::jit::pop(*stack, ARGUMENTS);
  const at::Tensor weight = arguments[WEIGHT].toTensor();
  int64_t outputs = arguments[TRANSPOSED].toBool() ? weight.size(1) * arguments[GROUPS].toInt() : weight.size(0);
  arguments.insert(arguments.begin() + WEIGHT + 1, c10::IValue(std::vector<int64_t>{outputs}));
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  compute(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace
}  // namespace simulated
