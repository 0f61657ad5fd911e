#include "argument_tensors.h"

#include <ATen/core/List.h>

namespace simulated {

c10::IValue with_tensors(const c10::IValue& value, const TensorChange& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? change(value.toTensor()) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

torch::jit::Stack with_tensors(const torch::jit::Stack& values, const TensorChange& change) {
  torch::jit::Stack results;
  for (const c10::IValue& value : values) {
    results.push_back(with_tensors(value, change));
  }
  return results;
}

int written_argument(const c10::FunctionSchema& schema, size_t result) {
  const auto* info = schema.returns()[result].alias_info();
  const auto& arguments = schema.arguments();
  for (size_t number = 0; info != nullptr && info->isWrite() && number < arguments.size(); ++number) {
    const auto* other = arguments[number].alias_info();
    if (other != nullptr && other->beforeSets() == info->beforeSets()) {
      return static_cast<int>(number);
    }
  }
  return -1;
}

}  // namespace simulated
