// Memory of the host that torch asks for as pinned. It is like any other, because the devices read all of the host's memory, but
// torch checks that it gets what it has asked for.

#pragma once

#include <c10/core/Allocator.h>

namespace simulated {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace simulated
