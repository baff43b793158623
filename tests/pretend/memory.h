// The device's memory, its streams as lists of tasks, and what tells that the host waits.
//
// [Note: two addresses] Nobody may touch the addresses that tensors have: they are reserved, and no more. The bytes lie
// at the same places of a second range, which kernels alone know: `bytes_at`. To open and close pages for each kernel
// would take a sixth of a training's time.
//
// [Note: locks] `State::lock` guards tables and is held for a few instructions. `Turn` is held while tasks of streams
// run, which may call Python: whoever waits for it gives the GIL up.

#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "cache.h"
#include "order.h"

extern "C" int PyGILState_Check();
extern "C" void* PyEval_SaveThread();
extern "C" void PyEval_RestoreThread(void*);

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Storage;
using c10::Stream;
using c10::StreamId;

constexpr auto kPretend = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 8;
constexpr size_t kPage = 4096;
constexpr size_t kUsable = size_t(64) << 20;  // addresses that get bytes at a time
constexpr size_t kSpace = size_t(1) << 42;  // addresses, not memory: enough that none is ever used twice

int (*wait_hook)(const char*) = nullptr;  // returns 1 where the wait is to be an error

std::atomic<int64_t> capturing_pool{0};  // of the graph that is captured now, on all threads and streams; 0: none

bool is_capturing() { return capturing_pool != 0; }

void host_waits(const char* why) {
  const bool captures = is_capturing();
  const auto text = captures ? c10::str("while a graph is captured: ", why) : std::string(why);
  const bool is_error = wait_hook && wait_hook(text.c_str());
  TORCH_CHECK(!captures, "operation not permitted while a graph of the pretend device is captured: ", why);
  TORCH_CHECK(!is_error, "the host waits for the pretend device: ", why);
}

struct Block {
  size_t nbytes;
  DeviceIndex device;
  StreamId stream;                        // that it was taken on
  std::map<StreamId, uint64_t> recorded;  // other streams that use it, up to a task
  std::set<StreamId> told;                // all that were recorded
};

struct Task {
  uint64_t number;
  std::function<void()> run;
  char* reads = nullptr;  // memory of the device
  char* writes = nullptr;
};

struct Queue {
  std::deque<Task> tasks;
  std::multiset<char*> in_use;  // memory of the tasks that run now, perhaps in another thread
  uint64_t issued = 0, done = 0;
};

struct Count {
  int64_t now = 0, peak = 0, taken = 0, freed = 0;
};

struct State {
  std::mutex lock;
  char* next = nullptr;
  char* usable = nullptr;  // up to here there are bytes
  ptrdiff_t to_bytes = 0;  // from an address
  std::map<char*, Block> blocks;
  std::map<char*, size_t> pinned;
  std::map<std::pair<DeviceIndex, StreamId>, Queue> queues;
  Count bytes[kDevices], blocks_taken[kDevices];
  StreamId last_stream = 0;
  bool reuses = false;  // addresses, as torch's caching allocator; else none is ever used twice
  Cache cache;
};

State& state() {
  static auto* one = new State;  // never destroyed: tensors outlive the interpreter's end
  return *one;
}

using Guard = std::lock_guard<std::mutex>;

thread_local DeviceIndex current_device = 0;
std::atomic<uint64_t> opened_devices{0};  // a bit for each device that a thread has made current
thread_local StreamId current_streams[kDevices] = {};

// Holds the turn to run tasks.
struct Turn {
  static std::recursive_mutex& mutex() {
    static auto* one = new std::recursive_mutex;
    return *one;
  }
  Turn() {
    if (mutex().try_lock()) return;
    void* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex().lock();
    if (thread) PyEval_RestoreThread(thread);
  }
  ~Turn() { mutex().unlock(); }
};

size_t rounded(size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

char* find_block(const void* address) {  // with the lock held
  auto& blocks = state().blocks;
  auto after = blocks.upper_bound((char*)address);
  if (after == blocks.begin()) return nullptr;
  --after;
  return (char*)address < after->first + std::max<size_t>(after->second.nbytes, 1) ? after->first : nullptr;
}

char* bytes_at(const void* address) { return address ? (char*)address + state().to_bytes : nullptr; }

std::atomic<int> num_replays{0};  // that run now: what they use of their own memory was taken by nobody

bool is_there(const char* base) {  // with the lock held
  return state().blocks.count((char*)base) || (num_replays && state().cache.is_of_graphs(base));
}

void check_block(char* base, const char* who) {
  if (!base) return;
  Guard guard(state().lock);
  TORCH_CHECK(is_there(base), who,
              " uses memory of the pretend device that was freed before it was "
              "run; keep the tensor until the stream was waited for, or tell with record_stream");
}

// Runs what the stream was given, up to a task.
void force(DeviceIndex device, StreamId stream, uint64_t number) {
  Queue* queue;
  {
    Guard guard(state().lock);
    queue = &state().queues[{device, stream}];
    if (queue->done >= number) return;
  }
  Turn turn;
  for (;;) {
    Task task;
    {
      Guard guard(state().lock);
      if (queue->tasks.empty() || queue->tasks.front().number > number) return;
      task = std::move(queue->tasks.front());
      queue->tasks.pop_front();
      queue->in_use.insert({task.reads, task.writes});
    }
    struct Done {
      Queue* queue;
      const Task& task;
      ~Done() {
        Guard guard(state().lock);
        for (auto* base : {task.reads, task.writes}) queue->in_use.erase(queue->in_use.find(base));
        queue->done = std::max(queue->done, task.number);
      }
    } done{queue, task};
    task.run();
    task.run = nullptr;  // what it holds goes before it counts as done
  }
}

uint64_t issued(DeviceIndex device, StreamId stream) {
  Guard guard(state().lock);
  return state().queues[{device, stream}].issued;
}

void force_stream(DeviceIndex device, StreamId stream) { force(device, stream, issued(device, stream)); }

void force_current(DeviceIndex device) { force_stream(device, current_streams[device]); }

void force_device(DeviceIndex device) {
  std::vector<StreamId> streams;
  {
    Guard guard(state().lock);
    for (auto& [key, queue] : state().queues)
      if (key.first == device && !queue.tasks.empty()) streams.push_back(key.second);
  }
  for (auto stream : streams) force_stream(device, stream);
}

void issue(DeviceIndex device, StreamId stream, std::function<void()> run, char* reads = nullptr,
           char* writes = nullptr) {
  Guard guard(state().lock);
  auto& queue = state().queues[{device, stream}];
  queue.tasks.push_back({++queue.issued, std::move(run), reads, writes});
}

void give_back(char* base) {
  Guard guard(state().lock);
  auto found = state().blocks.find(base);
  auto& block = found->second;
  if (!state().cache.give(base)) madvise(bytes_at(base), rounded(block.nbytes), MADV_DONTNEED);
  auto& bytes = state().bytes[block.device];
  bytes.now -= block.nbytes, bytes.freed += block.nbytes;
  --state().blocks_taken[block.device].now;
  state().blocks.erase(found);
}

bool is_awaited(char* base) {  // by a task that has not ended
  Guard guard(state().lock);
  for (auto& [_, queue] : state().queues) {
    if (queue.in_use.count(base)) return true;
    for (auto& task : queue.tasks)
      if (task.reads == base || task.writes == base) return true;
  }
  return false;
}

void free_block(void* address) {
  auto* base = (char*)address;
  DeviceIndex device;
  StreamId stream;
  std::map<StreamId, uint64_t> recorded;
  std::set<StreamId> told;
  {
    Guard guard(state().lock);
    auto& block = state().blocks.at(base);
    device = block.device, stream = block.stream, recorded = block.recorded, told = block.told;
  }
  for (auto [other, number] : recorded) {
    Guard guard(state().lock);
    auto& queue = state().queues[{device, other}];
    if (queue.done >= number) continue;
    state().blocks.at(base).recorded.erase(other);
    // After what the stream has now. Its number is that of the last task, so that nobody waits for more than he asked.
    queue.tasks.push_back({queue.issued, [base] { free_block(base); }});
    return;
  }
  // It is given back in the order of the stream that took it. What that has waited for may still use it.
  if (is_awaited(base)) try {
      force_stream(device, stream);
    } catch (const std::exception& error) {  // destructors must not throw
      TORCH_WARN(error.what());
    }
  bool is_of_graphs;  // then replays go on to use it, and are compared with these uses
  {
    Guard guard(state().lock);
    is_of_graphs = state().cache.is_of_graphs(base);
  }
  if (!is_of_graphs && !is_awaited(base)) end_uses(base, {device, stream}, told);
  give_back(base);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = current_device;
    if (!nbytes) return {nullptr, nullptr, &free_block, Device(kPretend, device)};
    Guard guard(state().lock);
    auto& s = state();
    if (!s.next) {
      auto* both = (char*)mmap(nullptr, 2 * kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(both != MAP_FAILED, "the pretend device gets no addresses");
      s.next = s.usable = both, s.to_bytes = kSpace;
      madvise(both, 2 * kSpace, MADV_NOHUGEPAGE);
    }
    auto more = [&](size_t size) {
      auto* base = std::exchange(s.next, s.next + size);
      for (; s.usable < s.next; s.usable += kUsable)
        TORCH_CHECK(!mprotect(bytes_at(s.usable), kUsable, PROT_READ | PROT_WRITE), "no memory for the pretend device");
      return base;
    };
    const int64_t graphs = capturing_pool;
    auto* base = s.reuses || graphs ? s.cache.take(rounded(nbytes), device, current_streams[device], graphs, more)
                                    : more(rounded(nbytes));
    s.blocks[base] = {nbytes, device, current_streams[device]};
    if (graphs) std::memset(bytes_at(base), 0, nbytes);  // kernels that check indices run on it before a replay does
    auto& bytes = s.bytes[device];
    bytes.now += nbytes, bytes.taken += nbytes, bytes.peak = std::max(bytes.peak, bytes.now);
    auto& blocks = s.blocks_taken[device];
    ++blocks.now, ++blocks.taken, blocks.peak = std::max(blocks.peak, blocks.now);
    return {base, base, &free_block, Device(kPretend, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    TORCH_CHECK(false, "copy_data is not for the pretend device");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    Guard guard(state().lock);
    auto* base = find_block(pointer.get());
    if (!base || stream.id() == state().blocks.at(base).stream) return;
    state().blocks.at(base).told.insert(stream.id());
    state().blocks.at(base).recorded[stream.id()] = state().queues[{stream.device_index(), stream.id()}].issued;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Guard guard(state().lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto fill = [](auto& all, const Count& count) {
      auto& stat = all[0];  // of both pools together
      stat.current = count.now, stat.peak = count.peak, stat.allocated = count.taken, stat.freed = count.freed;
    };
    for (auto* one : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      fill(*one, state().bytes[device]);
    fill(stats.allocation, state().blocks_taken[device]);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    Guard guard(state().lock);
    state().bytes[device].taken = state().bytes[device].freed = 0;
  }
  void resetPeakStats(DeviceIndex device) override {
    Guard guard(state().lock);
    state().bytes[device].peak = state().bytes[device].now;
    state().blocks_taken[device].peak = state().blocks_taken[device].now;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Guard guard(state().lock);
    const size_t all = size_t(80) << 30;
    return {all - state().bytes[device].now, all};
  }
};

struct PinnedMemory final : at::HostAllocator {
  static void unpin(void* address) {
    Guard guard(state().lock);
    munmap(address, state().pinned.at((char*)address));
    state().pinned.erase((char*)address);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &unpin, Device(c10::kCPU)};
    const auto size = rounded(nbytes);
    auto* base = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "no memory to pin");
    Guard guard(state().lock);
    state().pinned[base] = size;
    return {base, base, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  static bool has(const void* address) {
    Guard guard(state().lock);
    auto after = state().pinned.upper_bound((char*)address);
    return after != state().pinned.begin() && (--after, (char*)address < after->first + after->second);
  }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

}  // namespace
