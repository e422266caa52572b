// The device's memory: an allocator that hands freed memory on at once, in the order of the stream that it was
// allocated on, as CUDA's caching allocator does.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../accelerator/shared.h"
#include "queues.h"

namespace racecheck {

using namespace standin;

constexpr size_t kBlockBytes = 512;
constexpr size_t kSegmentBytes = 1 << 20;

inline Key current_key(c10::DeviceIndex device) { return key_of(device, current_stream[device]); }

inline void free_on_device(void* pointer);

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    const auto index = current_device;
    const c10::Device device{kDevice, index};
    if (size_bytes == 0) return {nullptr, nullptr, &free_on_device, device};
    fail_if_asked(size_bytes);
    const size_t rounded_bytes = (size_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    const Lock guard(queues.lock);
    collect_deferred();
    queues.pass_time();
    const Key owner = current_key(index);
    const auto start = take(owner, rounded_bytes);
    queues.checker.begin(start, start + rounded_bytes, owner, queues.now(owner));
    queues.make_fresh(owner, start, rounded_bytes);
    queues.note(5, static_cast<Key>(rounded_bytes));
    taken_[start] = {rounded_bytes, index, owner};
    count(index, static_cast<int64_t>(rounded_bytes));
    auto* pointer = reinterpret_cast<void*>(start);
    return {pointer, pointer, &free_on_device, device};
  }

  void release(void* pointer) {
    const Lock guard(queues.lock);
    const auto start = reinterpret_cast<uintptr_t>(pointer);
    auto* block = queues.checker.block_at(start);
    queues.note(6, static_cast<Key>(taken_[start].size_bytes));
    if (block != nullptr && !block->recorded.empty()) {  // it goes back after these streams, as they stand now
      std::vector<std::shared_ptr<Mark>> marks;
      for (const Key key : block->recorded) marks.push_back(queues.mark(key));
      deferred_.emplace_back(start, std::move(marks));
      return;
    }
    give_back(start, {});
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    default_copy_data(target, source, size_bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const Lock guard(queues.lock);
    auto* block = queues.checker.block_at(reinterpret_cast<uintptr_t>(data.get()));
    const auto key = key_of(stream.device_index(), stream.id());
    if (block != nullptr && block->owner != key) block->recorded.insert(key);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock guard(queues.lock);
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const Lock guard(queues.lock);
    stats_[device].active_bytes[0].reset_accumulated();
    stats_[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock guard(queues.lock);
    stats_[device].active_bytes[0].reset_peak();
    stats_[device].allocated_bytes[0].reset_peak();
  }

  // Everything is over: any stream may have any memory.
  void forget() {
    collect_deferred();
    for (auto& [_, pool] : pools_) {
      for (const auto& [start, size_bytes] : pool) spare_[start] = size_bytes;
      pool.clear();
    }
  }

  size_t num_reused = 0;

 private:
  struct Taken {
    size_t size_bytes;
    c10::DeviceIndex device;
    Key owner;
  };
  using Pool = std::map<uintptr_t, size_t>;

  uintptr_t take(Key owner, size_t size_bytes) {
    for (auto* pool : {&pools_[owner], &spare_}) {
      auto best = pool->end();
      for (auto each = pool->begin(); each != pool->end(); ++each) {
        if (each->second >= size_bytes && (best == pool->end() || each->second < best->second)) best = each;
      }
      if (best == pool->end()) continue;
      const auto [start, found_bytes] = *best;
      pool->erase(best);
      if (found_bytes > size_bytes) pools_[owner][start + size_bytes] = found_bytes - size_bytes;
      ++num_reused;
      return start;
    }
    const size_t segment_bytes = std::max(size_bytes, kSegmentBytes);
    void* segment = std::aligned_alloc(4096, (segment_bytes + 4095) / 4096 * 4096);
    TORCH_CHECK_WITH(OutOfMemoryError, segment != nullptr, "the device of the race checker is out of memory");
    std::memset(segment, 0xFF, segment_bytes);
    const auto start = reinterpret_cast<uintptr_t>(segment);
    if (segment_bytes > size_bytes) pools_[owner][start + size_bytes] = segment_bytes - size_bytes;
    return start;
  }

  void give_back(uintptr_t start, const std::vector<std::shared_ptr<Mark>>& marks) {
    const auto taken = taken_.at(start);
    for (const auto& mark : marks) merge(queues.stream(taken.owner).clock, mark->clock);
    queues.checker.free(start);
    queues.make_stale(taken.owner, start, taken.size_bytes);
    taken_.erase(start);
    count(taken.device, -static_cast<int64_t>(taken.size_bytes));
    auto& pool = pools_[taken.owner];
    auto here = pool.emplace(start, taken.size_bytes).first;
    const auto next = std::next(here);
    if (next != pool.end() && here->first + here->second == next->first) {
      here->second += next->second;
      pool.erase(next);
    }
    if (here != pool.begin()) {
      const auto before = std::prev(here);
      if (before->first + before->second == here->first) {
        before->second += here->second;
        pool.erase(here);
      }
    }
  }

  void collect_deferred() {
    for (auto each = deferred_.begin(); each != deferred_.end();) {
      const auto& marks = each->second;
      if (std::all_of(marks.begin(), marks.end(), [](const auto& mark) { return queues.is_reached(mark); })) {
        give_back(each->first, marks);
        each = deferred_.erase(each);
      } else {
        ++each;
      }
    }
  }

  void count(c10::DeviceIndex device, int64_t change_bytes) {
    watched[device].add(change_bytes);
    for (auto* stat : {&stats_[device].active_bytes, &stats_[device].allocated_bytes}) {
      if (change_bytes > 0) {
        (*stat)[0].increase(change_bytes);
      } else {
        (*stat)[0].decrease(-change_bytes);
      }
    }
  }

  std::unordered_map<uintptr_t, Taken> taken_;
  std::map<Key, Pool> pools_;
  Pool spare_;
  std::vector<std::pair<uintptr_t, std::vector<std::shared_ptr<Mark>>>> deferred_;
  c10::CachingDeviceAllocator::DeviceStats stats_[kNumDevices];
};

inline Allocator& allocator = *new Allocator;  // never destroyed: storages die after static objects do

inline void free_on_device(void* pointer) {
  if (pointer != nullptr) allocator.release(pointer);
}

}  // namespace racecheck
