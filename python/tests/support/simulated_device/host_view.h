// What tasks of streams need to compute with the devices' tensors on the host.

#pragma once

#include <ATen/core/Tensor.h>

#include "streams.h"

namespace simulated {

inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// A tensor of the host with the same memory. It does not keep the memory alive: the order of streams protects a device's memory,
// and code that relies on more than that must fail.
at::Tensor host_view(const at::Tensor& tensor);

Stream& current_stream_of(const at::Tensor& tensor);

}  // namespace simulated
