// Addresses of freed memory that are given again, as CUDA's caching allocator of torch does it.
//
// Segments are taken for good, and split. What is freed is merged with free neighbours of its segment. Asked for bytes,
// the smallest range of the same stream that is large enough is given, the first of equal ones. So a program that does
// the same in every step gets the same addresses, if what it holds at the end of a step is the same. What a graph takes
// while it is captured is of segments of its own, and goes back to them.

#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <set>
#include <tuple>

namespace {

constexpr size_t kSmall = size_t(1) << 20;  // ranges above are of segments of their own kind
constexpr size_t kSmallSegment = size_t(2) << 20;
constexpr size_t kLargeSegment = size_t(20) << 20;
constexpr size_t kLarge = size_t(10) << 20;  // ranges above have a segment for themselves

struct Cache {
  using Pool = std::tuple<c10::DeviceIndex, c10::StreamId, bool, int64_t>;  // of small ranges?; of graphs, or 0
  struct Range {
    Pool pool;
    size_t nbytes;
    char* segment;
    bool is_free;
  };
  std::map<char*, Range> ranges;
  std::map<Pool, std::set<std::pair<size_t, char*>>> free;

  // nbytes: of whole pages. more: gives addresses for a segment.
  char* take(size_t nbytes, c10::DeviceIndex device, c10::StreamId stream, int64_t graphs,
             const std::function<char*(size_t)>& more) {
    const bool is_small = nbytes <= kSmall;
    const Pool pool{device, stream, is_small, graphs};
    auto& there = free[pool];
    auto found = there.lower_bound({nbytes, nullptr});
    char* base;
    if (found == there.end()) {
      const auto size = is_small            ? kSmallSegment
                        : nbytes <= kLarge ? kLargeSegment
                                           : (nbytes + kSmallSegment - 1) / kSmallSegment * kSmallSegment;
      base = more(size);
      ranges[base] = {pool, size, base, true};
    } else {
      base = found->second;
      there.erase(found);
    }
    auto& range = ranges.at(base);
    range.is_free = false;
    if (const auto left = range.nbytes - nbytes; is_small ? left > 0 : left > kSmall) {
      range.nbytes = nbytes;
      ranges[base + nbytes] = {pool, left, range.segment, true};
      there.insert({left, base + nbytes});
    }
    return base;
  }

  // Whether the address is of memory that graphs keep.
  bool is_of_graphs(const char* address) const {
    auto after = ranges.upper_bound((char*)address);
    if (after == ranges.begin()) return false;
    --after;
    return address < after->first + after->second.nbytes && std::get<3>(after->second.pool);
  }

  // Whether it was taken here.
  bool give(char* base) {
    auto range = ranges.find(base);
    if (range == ranges.end()) return false;
    auto& there = free[range->second.pool];
    auto joins = [&](auto other) {
      return other != ranges.end() && other->second.is_free && other->second.segment == range->second.segment;
    };
    if (auto next = std::next(range); joins(next)) {
      there.erase({next->second.nbytes, next->first});
      range->second.nbytes += next->second.nbytes;
      ranges.erase(next);
    }
    if (auto before = range == ranges.begin() ? ranges.end() : std::prev(range); joins(before)) {
      there.erase({before->second.nbytes, before->first});
      before->second.nbytes += range->second.nbytes;
      ranges.erase(range);
      range = before;
    }
    range->second.is_free = true;
    there.insert({range->second.nbytes, range->first});
    return true;
  }
};

}  // namespace
