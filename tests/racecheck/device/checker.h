// The happens-before checker: each access to memory against the earlier accesses to the same bytes.
//
// Two accesses to the same bytes, of which one writes, must be ordered: by their stream, by events, or by the host
// having waited. Otherwise they race, also when this run happened to carry them out in the right order.
//
// [Note: freed memory]
// An allocator hands freed memory on at once, in the order of the stream that it was allocated on. So the next kernel
// that is queued in that stream after the free may be the new user, whatever it is called with here: all accesses to
// the freed memory must be ordered before it. A new block has the old accesses until then, and for other streams it
// begins with a write by the stream that it was allocated on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "clocks.h"

namespace racecheck {

struct Range {
  uintptr_t start;
  uintptr_t stop;
  bool is_write;
};

struct Access {
  Range range;
  Key key;
  uint64_t tick;
  std::string what;
};

// Memory that was freed, and has had no new user yet.
struct Freed {
  Range range;
  std::vector<Access> accesses;
};

// Memory of the device that an allocation covers, or host memory that a device copies from and to.
struct Block {
  uintptr_t stop;
  Key owner;  // the stream that it was allocated on; kHost for host memory
  std::vector<Access> accesses;
  std::set<Key> recorded;  // streams that were announced by `record_stream`
};

class Checker {
 public:
  // Memory that is carved out of what the owner's stream freed before: others must come after that stream's work.
  void begin(uintptr_t start, uintptr_t stop, Key owner, const Clock& clock) {
    auto& block = blocks_[start];
    block = {stop, owner, {}, {}};
    for (const auto& freed : freed_[owner]) {
      if (freed.range.start < stop && start < freed.range.stop) {
        block.accesses.insert(block.accesses.end(), freed.accesses.begin(), freed.accesses.end());
      }
    }
    const auto tick = tick_in(clock, owner);
    if (owner != kHost && tick > 0) {
      block.accesses.push_back({{start, stop, true}, owner, tick, "the work before its memory was allocated"});
    }
  }

  // Device memory that is freed: [Note: freed memory].
  void free(uintptr_t start) {
    const auto found = blocks_.find(start);
    if (found == blocks_.end()) return;
    auto& block = found->second;
    auto& accesses = block.accesses;
    accesses.erase(
        std::remove_if(
            accesses.begin(), accesses.end(), [&](const Access& one) { return block.recorded.count(one.key) > 0; }),
        accesses.end());
    freed_[block.owner].push_back({{start, block.stop, true}, std::move(accesses)});
    blocks_.erase(found);
  }

  // A kernel is queued that may be the new user of what its stream's allocations have freed.
  void reuse(Key owner, const Clock& clock) {
    for (const auto& freed : freed_[owner]) check_before(freed.accesses, clock, "has a new user");
    freed_[owner].clear();
  }

  // Host memory that is unpinned now.
  void unpin(uintptr_t start, const Clock& clock) {
    const auto found = blocks_.find(start);
    if (found == blocks_.end()) return;
    check_before(found->second.accesses, clock, "is unpinned");
    blocks_.erase(found);
  }

  Block* block_at(uintptr_t address) {
    auto found = blocks_.upper_bound(address);
    if (found == blocks_.begin()) return nullptr;
    --found;
    return address < found->second.stop ? &found->second : nullptr;
  }

  bool covers(uintptr_t start, uintptr_t stop) {
    const auto* block = block_at(start);
    return block != nullptr && stop <= block->stop;
  }

  void access(const Range& range, Key key, const Clock& clock, const std::string& what) {
    auto* block = block_at(range.start);
    if (block == nullptr || block->stop < range.stop) {
      complain("use after free: " + what + (range.is_write ? " writes to" : " reads") + " memory that is free");
      return;
    }
    auto& accesses = block->accesses;
    for (const auto& earlier : accesses) {
      if (earlier.range.start < range.stop && range.start < earlier.range.stop &&
          (range.is_write || earlier.range.is_write) && tick_in(clock, earlier.key) < earlier.tick) {
        complain(
            "race: nothing orders " + what + (range.is_write ? " (writes)" : " (reads)") + " after " + earlier.what +
            (earlier.range.is_write ? " (writes)" : " (reads)"));
      }
    }
    // What this access hides: whoever is not ordered after the hidden one is not ordered after this one either.
    accesses.erase(
        std::remove_if(
            accesses.begin(), accesses.end(),
            [&](const Access& earlier) {
              return range.start <= earlier.range.start && earlier.range.stop <= range.stop &&
                  (range.is_write || !earlier.range.is_write) && tick_in(clock, earlier.key) >= earlier.tick &&
                  (range.is_write || earlier.key == key);
            }),
        accesses.end());
    accesses.push_back({range, key, tick_in(clock, key), what});
  }

  void complain(const std::string& text) {
    ++num_complaints_;
    if (complaints_.size() < kMostComplaints) complaints_.push_back(text);
  }

  std::vector<std::string> take_complaints() { return std::exchange(complaints_, {}); }

  // Everything is over, and the host knows it.
  void forget_accesses() {
    for (auto& [_, block] : blocks_) block.accesses.clear();
    freed_.clear();
  }

 private:
  void check_before(const std::vector<Access>& accesses, const Clock& clock, const char* what) {
    for (const auto& access : accesses) {
      if (tick_in(clock, access.key) < access.tick) {
        complain("use after free: nothing orders " + access.what + " before its memory " + what);
      }
    }
  }

  static constexpr size_t kMostComplaints = 20;
  std::map<uintptr_t, Block> blocks_;
  std::map<Key, std::vector<Freed>> freed_;
  std::vector<std::string> complaints_;
  uint64_t num_complaints_ = 0;
};

}  // namespace racecheck
