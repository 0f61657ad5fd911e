// Makes torch know the devices: their streams and events, and what else it asks of every kind of accelerator.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "memory.h"
#include "pinned_memory.h"
#include "streams.h"

namespace simulated {
namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

// An event stands for the moment at which it was recorded last.
struct Event {
  std::mutex lock;
  std::shared_ptr<Moment> latest;

  std::shared_ptr<Moment> get() {
    std::lock_guard guard(lock);
    return latest;
  }
};

std::shared_ptr<Moment> moment_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->get();
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

c10::Stream as_torch_stream(int device, int64_t stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)), stream);
}

Stream& as_own_stream(const c10::Stream& stream) {
  return stream_of(stream.device_index(), stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override {
    return c10::Device(TYPE, static_cast<c10::DeviceIndex>(current_device()));
  }

  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < DEVICES, "there is no device ", device);
    set_current_device(index_of(device));
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(index_of(device));
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_torch_stream(index_of(device), current_stream_id(index_of(device)));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_torch_stream(index_of(device), 0);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_torch_stream(index_of(device), new_stream(index_of(device)));
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    set_current_stream_id(stream.device_index(), stream.id());
    return before;
  }

  bool queryStream(const c10::Stream& stream) const override {
    return as_own_stream(stream).is_idle();
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    as_own_stream(stream).synchronize();
  }

  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto* own = static_cast<Event*>(*event);
    auto moment = as_own_stream(stream).mark();
    std::lock_guard guard(own->lock);
    own->latest = std::move(moment);
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (auto moment = moment_of(event)) {
      as_own_stream(stream).wait_for(std::move(moment));
    }
  }

  bool queryEvent(void* event) const override {
    auto moment = moment_of(event);
    return moment == nullptr || moment->is_reached();
  }

  void synchronizeEvent(void* event) const override {
    if (auto moment = moment_of(event)) {
      moment->wait();
    }
    check_failure();
  }

  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto from = moment_of(first), to = moment_of(second);
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must have been recorded");
    TORCH_CHECK(from->is_reached() && to->is_reached(), "both events must have been reached");
    return std::chrono::duration<double, std::milli>(to->time() - from->time()).count();
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory, stream.id());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return true;
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device < 0 ? getCurrentDevice() : device);
  }

  // Random numbers are made by the host's generator.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }

  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }

  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = allocator()->allocate(size);
    void* to = memory.get();
    const void* from = storage.data();
    size_t kept = std::min(size, storage.nbytes());
    if (kept > 0) {
      current_stream(current_device()).submit([=] { std::memcpy(to, from, kept); });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

void put_on_current_stream(double seconds) {
  current_stream(current_device()).submit([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  });
}

}  // namespace
}  // namespace simulated

extern "C" {

void simulated_register() {
  static auto* guard = new simulated::Guard();
  static auto* hooks = new simulated::Hooks();
  c10::impl::registerDeviceGuard(simulated::TYPE, guard);
  at::RegisterPrivateUse1HooksInterface(hooks);
  c10::SetAllocator(simulated::TYPE, simulated::allocator());
  // Tasks use parts of torch, which are destroyed after this.
  std::atexit(simulated::stop);
}

int simulated_device_count() {
  return simulated::DEVICES;
}

int simulated_current_device() {
  return simulated::current_device();
}

void simulated_set_device(int device) {
  simulated::set_current_device(device);
}

void simulated_sleep(double seconds) {
  simulated::put_on_current_stream(seconds);
}

void simulated_drain(double seconds) {
  simulated::drain(seconds);
}
}
