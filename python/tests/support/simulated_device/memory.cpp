#include "memory.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <tuple>
#include <vector>

#include "streams.h"

namespace simulated {
namespace {

constexpr size_t SMALL_UNIT = 512;
constexpr size_t LARGE_UNIT = 2 << 20;
constexpr size_t LARGE = 1 << 20;
constexpr size_t ALIGNMENT = 64;

struct Block {
  void* memory;
  size_t size;
  int device;
  int64_t stream;
  std::set<int64_t> other_streams;
};

// Blocks are given out again only for the same size, on the same stream. Their memory is never returned to the host, because
// a task that is in error may still write to it.
class Blocks {
 public:
  Block* take(size_t size, int device, int64_t stream) {
    {
      std::lock_guard guard(lock);
      auto& blocks = free[{device, stream, size}];
      if (!blocks.empty()) {
        Block* block = blocks.back();
        blocks.pop_back();
        return block;
      }
    }
    void* memory = std::aligned_alloc(ALIGNMENT, size);
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
    return new Block{memory, size, device, stream, {}};
  }

  void give_back(Block* block) {
    std::lock_guard guard(lock);
    free[{block->device, block->stream, block->size}].push_back(block);
  }

 private:
  std::mutex lock;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<Block*>> free;
};

Blocks& blocks() {
  static auto* blocks = new Blocks();
  return *blocks;
}

size_t rounded(size_t size) {
  size_t unit = size <= LARGE ? SMALL_UNIT : LARGE_UNIT;
  return (size + unit - 1) / unit * unit;
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->other_streams.empty()) {
    // Tasks of its own stream may still use it. The tasks that use it next come after them.
    blocks().give_back(block);
    return;
  }
  auto streams = std::move(block->other_streams);
  block->other_streams.clear();
  auto remaining = std::make_shared<std::atomic<size_t>>(streams.size());
  for (int64_t stream : streams) {
    stream_of(block->device, stream).submit([block, remaining] {
      if (--*remaining == 0) {
        blocks().give_back(block);
      }
    });
  }
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    int index = current_device();
    c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
    if (size == 0) {
      return {nullptr, nullptr, &release_nothing, device};
    }
    int64_t stream = current_stream_id(index);
    Block* block = blocks().take(rounded(size), index, stream);
    // What the memory held must not be relied on. These bytes are NaN in each type of floating-point numbers.
    stream_of(index, stream).submit([block] { std::memset(block->memory, 0xFF, block->size); });
    return {block->memory, block, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    current_stream(current_device()).submit([to, from, size] { std::memcpy(to, from, size); });
  }

 private:
  static void release_nothing(void*) {}
};

}  // namespace

c10::Allocator* allocator() {
  static auto* allocator = new DeviceAllocator();
  return allocator;
}

void record_use(const c10::DataPtr& memory, int64_t stream) {
  if (memory.get_deleter() != &release) {
    return;
  }
  auto* block = static_cast<Block*>(memory.get_context());
  if (stream != block->stream) {
    block->other_streams.insert(stream);
  }
}

}  // namespace simulated
