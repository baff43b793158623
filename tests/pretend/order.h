// Whether what streams do with memory is ordered by what they have waited for.
//
// Each stream counts its work, and has a clock: how much of each stream's work comes before its next. Where two streams
// use the same bytes, one of them to write, the later use must have the earlier one in its clock. That is so or not so
// whenever the work really runs, which here is at once.

#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

using Key = std::pair<c10::DeviceIndex, c10::StreamId>;
using Clock = std::map<Key, uint64_t>;

struct Use {
  Key stream;
  uint64_t number;
  const char *low, *high;
  bool writes;
};

struct Order {
  std::mutex lock;
  Clock host;                                      // what the host has waited for; all that it gives out comes after
  std::map<Key, Clock> streams;                    // of itself: how much work it was given
  std::map<const char*, std::vector<Use>> blocks;  // by the address of a block
  std::string fault;                               // found where nothing could be raised
};

Order& order() {
  static auto* one = new Order;
  return *one;
}

void merge(Clock& into, const Clock& from) {
  for (const auto& [key, number] : from) into[key] = std::max(into[key], number);
}

Clock clock_of(Key stream) {
  std::lock_guard<std::mutex> guard(order().lock);
  return order().streams[stream];
}

void stream_waits(Key stream, const Clock& clock) {
  std::lock_guard<std::mutex> guard(order().lock);
  merge(order().streams[stream], clock);
}

void host_has_waited(const Clock& clock) {
  std::lock_guard<std::mutex> guard(order().lock);
  merge(order().host, clock);
}

void host_has_waited_for_all() {
  std::lock_guard<std::mutex> guard(order().lock);
  for (const auto& [_, clock] : order().streams) merge(order().host, clock);
}

// The stream is given a kernel or a copy: `use` says of what.
void begin_work(Key stream) {
  std::lock_guard<std::mutex> guard(order().lock);
  if (auto fault = std::exchange(order().fault, ""); !fault.empty()) TORCH_CHECK(false, fault);
  auto& clock = order().streams[stream];
  merge(clock, order().host);
  ++clock[stream];
}

bool is_before(const Use& use, Clock& clock) { return clock[use.stream] >= use.number; }

// The work that the stream was given last uses these bytes of a block.
void use(Key stream, const char* base, const char* low, const char* high, bool writes, const std::string& who) {
  if (!base || low == high) return;
  std::lock_guard<std::mutex> guard(order().lock);
  auto& clock = order().streams[stream];
  auto& uses = order().blocks[base];
  for (const auto& one : uses)
    TORCH_CHECK(one.low >= high || low >= one.high || !(one.writes || writes) || is_before(one, clock), who,
                " on stream ", stream.second, writes ? " writes" : " reads", " memory that stream ", one.stream.second,
                one.writes ? " writes" : " reads", ", and has not waited for it");
  std::vector<Use> kept;
  for (const auto& one : uses) {
    const bool covered = low <= one.low && one.high <= high;
    if (!covered || (one.writes && !writes) || !(one.stream == stream || (writes && is_before(one, clock))))
      kept.push_back(one);
  }
  kept.push_back({stream, clock[stream], low, high, writes});
  uses = std::move(kept);
}

// A block goes back, in the order of the stream that took it. known: other streams that it was told of.
template <class Known>
void end_uses(const char* base, Key stream, const Known& known) {
  std::lock_guard<std::mutex> guard(order().lock);
  auto& clock = order().streams[stream];
  merge(clock, order().host);
  for (const auto& one : order().blocks[base])
    if (!is_before(one, clock) && !known.count(one.stream.second))
      order().fault = c10::str("memory that stream ", one.stream.second, one.writes ? " writes" : " reads",
                               " was freed before stream ", stream.second,
                               ", which took it, has waited for that; wait, or tell with record_stream");
  order().blocks.erase(base);
}

}  // namespace
