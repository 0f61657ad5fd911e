// The tensors among the arguments and results of any operator.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <functional>

namespace simulated {

using TensorChange = std::function<at::Tensor(const at::Tensor&)>;

// The value with other tensors instead of its own ones. Those that are not defined stay so.
c10::IValue with_tensors(const c10::IValue& value, const TensorChange& change);
torch::jit::Stack with_tensors(const torch::jit::Stack& values, const TensorChange& change);

// The number of the argument to which the operator writes this result, or -1.
int written_argument(const c10::FunctionSchema& schema, size_t result);

}  // namespace simulated
