#include "pinned_memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace simulated {
namespace {

class Ranges {
 public:
  void add(const void* address, size_t size) {
    std::lock_guard guard(lock);
    sizes[static_cast<const char*>(address)] = size;
  }

  void remove(const void* address) {
    std::lock_guard guard(lock);
    sizes.erase(static_cast<const char*>(address));
  }

  bool contain(const void* address) {
    std::lock_guard guard(lock);
    auto* wanted = static_cast<const char*>(address);
    auto next = sizes.upper_bound(wanted);
    if (next == sizes.begin()) {
      return false;
    }
    const auto& [start, size] = *--next;
    return wanted < start + size;
  }

 private:
  std::mutex lock;
  std::map<const char*, size_t> sizes;
};

Ranges& ranges() {
  static auto* ranges = new Ranges();
  return *ranges;
}

void release(void* memory) {
  ranges().remove(memory);
  std::free(memory);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return {nullptr, nullptr, [](void*) {}, c10::Device(c10::DeviceType::CPU)};
    }
    void* memory = std::malloc(size);
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
    ranges().add(memory, size);
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

bool is_pinned(const void* address) {
  return ranges().contain(address);
}

}  // namespace simulated
