// Vector clocks (Lamport 1978, Mattern 1988): what a stream, an event or the host knows to have happened.
#pragma once

#include <cstdint>
#include <map>

namespace racecheck {

// A stream of a device, or the host. Streams of two devices have different keys.
using Key = int64_t;
constexpr Key kHost = -1;

inline Key key_of(int device, int64_t stream) { return (static_cast<Key>(device) << 40) | stream; }

// For each stream, how many of its entries are known to happen before.
using Clock = std::map<Key, uint64_t>;

inline uint64_t tick_in(const Clock& clock, Key key) {
  const auto found = clock.find(key);
  return found == clock.end() ? 0 : found->second;
}

inline void merge(Clock& into, const Clock& other) {
  for (const auto& [key, tick] : other) {
    auto& mine = into[key];
    if (tick > mine) mine = tick;
  }
}

}  // namespace racecheck
