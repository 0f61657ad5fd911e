// Memory of the simulated devices, which is memory of the host that only the devices' tasks may use.

#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace simulated {

// Allocates on the calling thread's current device, for use on its current stream there.
c10::Allocator* allocator();

// Has the memory be reused only when this stream has run the tasks that it has when the memory is freed.
void record_use(const c10::DataPtr& memory, int64_t stream);

}  // namespace simulated
