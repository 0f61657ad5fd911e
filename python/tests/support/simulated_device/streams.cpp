#include "streams.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

namespace simulated {
namespace {

constexpr double DEFAULT_DELAY_MS = 2.0;

using StreamsOfDevice = std::array<Stream, STREAMS>;

// These are never destroyed, because threads of streams use them until the process ends.
std::array<StreamsOfDevice, DEVICES>& all_streams() {
  static auto* streams = new std::array<StreamsOfDevice, DEVICES>();
  return *streams;
}

std::mutex& failure_lock() {
  static auto* lock = new std::mutex();
  return *lock;
}

std::string& failure() {
  static auto* message = new std::string();
  return *message;
}

std::atomic<bool> is_stopping{false};
std::atomic<int> next_stream[DEVICES];
thread_local int device_of_thread = 0;
thread_local int64_t streams_of_thread[DEVICES] = {};

void remember_failure(const char* message) {
  std::lock_guard guard(failure_lock());
  if (failure().empty()) {
    failure() = message;
  }
}

std::chrono::duration<double, std::milli> delay_of_late_tasks() {
  static const double delay = [] {
    const char* set = std::getenv("SIMULATED_COPY_DELAY_MS");
    return set != nullptr ? std::atof(set) : DEFAULT_DELAY_MS;
  }();
  return std::chrono::duration<double, std::milli>(delay);
}

}  // namespace

void Moment::reach() {
  std::lock_guard guard(lock);
  at = Clock::now();
  is_past = true;
  reached.notify_all();
}

bool Moment::is_reached() {
  std::lock_guard guard(lock);
  return is_past;
}

void Moment::wait() {
  std::unique_lock guard(lock);
  reached.wait(guard, [this] { return is_past; });
}

bool Moment::wait_until(Clock::time_point deadline) {
  std::unique_lock guard(lock);
  return reached.wait_until(guard, deadline, [this] { return is_past; });
}

Clock::time_point Moment::time() {
  std::lock_guard guard(lock);
  return at;
}

void Stream::submit(Task task) {
  add({std::move(task), false});
}

void Stream::submit_late(Task task) {
  add({std::move(task), true});
}

std::shared_ptr<Moment> Stream::mark() {
  auto moment = std::make_shared<Moment>();
  submit([moment] { moment->reach(); });
  return moment;
}

void Stream::wait_for(std::shared_ptr<Moment> moment) {
  submit([moment = std::move(moment)] { moment->wait(); });
}

bool Stream::is_idle() {
  std::lock_guard guard(lock);
  return entries.empty() && !is_running;
}

void Stream::synchronize() {
  if (!is_idle()) {
    mark()->wait();
  }
  check_failure();
}

void Stream::add(Entry entry) {
  std::lock_guard guard(lock);
  entries.push_back(std::move(entry));
  if (!is_started) {
    is_started = true;
    std::thread([this] { run(); }).detach();
  }
  added.notify_one();
}

void Stream::run() {
  bool follows_late_task = false;
  while (true) {
    Entry entry;
    {
      std::unique_lock guard(lock);
      is_running = false;
      if (entries.empty() || is_stopping) {
        follows_late_task = false;
        added.wait(guard, [this] { return !entries.empty() && !is_stopping; });
      }
      entry = std::move(entries.front());
      entries.pop_front();
      is_running = true;
    }
    if (entry.is_late && !follows_late_task) {
      std::this_thread::sleep_for(delay_of_late_tasks());
    }
    follows_late_task = entry.is_late;
    try {
      entry.task();
    } catch (const c10::Error& error) {
      remember_failure(error.what_without_backtrace());
    } catch (const std::exception& error) {
      remember_failure(error.what());
    }
  }
}

Stream& stream_of(int device, int64_t stream) {
  return all_streams().at(device).at(stream);
}

int64_t new_stream(int device) {
  return 1 + next_stream[device]++ % (STREAMS - 1);
}

int current_device() {
  return device_of_thread;
}

void set_current_device(int device) {
  device_of_thread = device;
}

int64_t current_stream_id(int device) {
  return streams_of_thread[device];
}

void set_current_stream_id(int device, int64_t stream) {
  streams_of_thread[device] = stream;
}

Stream& current_stream(int device) {
  return stream_of(device, current_stream_id(device));
}

void synchronize_device(int device) {
  for (auto& stream : all_streams().at(device)) {
    stream.synchronize();
  }
}

void check_failure() {
  std::lock_guard guard(failure_lock());
  if (!failure().empty()) {
    throw std::runtime_error("a task of a simulated device has failed: " + failure());
  }
}

void drain(double seconds) {
  auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (auto& streams : all_streams()) {
    for (auto& stream : streams) {
      if (!stream.is_idle() && !stream.mark()->wait_until(deadline)) {
        return;
      }
    }
  }
}

void stop() {
  is_stopping = true;
  // A task that waits for another stream does not end now. Such a task uses nothing that the process's end destroys.
  auto deadline = Clock::now() + std::chrono::milliseconds(200);
  for (auto& streams : all_streams()) {
    for (auto& stream : streams) {
      while (!stream.is_idle() && Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
}

}  // namespace simulated
