// Streams of the simulated devices, and the moments of streams that events stand for.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace simulated {

constexpr int DEVICES = 2;
// A device's default stream and 32 others, which are given out in turn, as CUDA's are.
constexpr int STREAMS = 33;

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;

// A point in a stream's work, which the stream reaches at some time.
class Moment {
 public:
  void reach();
  bool is_reached();
  void wait();
  // Waits no longer than until the deadline. Returns whether the stream has reached the moment.
  bool wait_until(Clock::time_point deadline);
  // Only valid when the stream has reached the moment.
  Clock::time_point time();

 private:
  std::mutex lock;
  std::condition_variable reached;
  bool is_past = false;
  Clock::time_point at;
};

// Runs tasks one after the other on a thread of its own, which starts with the first task: a process may be forked before.
class Stream {
 public:
  void submit(Task task);
  // As `submit`, but the task begins late. One that directly follows another late task is late anyway.
  void submit_late(Task task);
  // A moment after all tasks that were submitted so far.
  std::shared_ptr<Moment> mark();
  void wait_for(std::shared_ptr<Moment> moment);
  bool is_idle();
  // Blocks the calling thread until all tasks that were submitted so far have run. Raises if a task has failed.
  void synchronize();

 private:
  struct Entry {
    Task task;
    bool is_late;
  };

  void add(Entry entry);
  void run();

  std::mutex lock;
  std::condition_variable added;
  std::deque<Entry> entries;
  bool is_started = false;
  bool is_running = false;
};

Stream& stream_of(int device, int64_t stream);
int64_t new_stream(int device);

// Those of the calling thread.
int current_device();
void set_current_device(int device);
int64_t current_stream_id(int device);
void set_current_stream_id(int device, int64_t stream);
Stream& current_stream(int device);

void synchronize_device(int device);
// Raises if a task of any stream has failed, as a device reports errors of its work at a later call.
void check_failure();

// Waits until all streams are idle, but no longer than this. It does not raise.
void drain(double seconds);
// Keeps all streams from beginning another task, and returns when none runs.
void stop();

}  // namespace simulated
