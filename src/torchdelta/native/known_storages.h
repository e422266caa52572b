// The storages of what the recorder has seen.
//
// Each is known by its address, and a weak reference keeps that address from being another storage's once it has died.
// Bare addresses do not do: most of these storages are small and die soon, malloc gives their addresses to the next
// ones, and then ops would be recorded in vain that the tape, or nothing, should record. What such an op reads stays in
// memory. So some steps would need more memory than others that are like them, by chance.
#pragma once
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <unordered_map>

namespace known_storages {

class KnownStorages {
 public:
  void add(const c10::Storage& storage) {
    if (!storage || contains(storage)) return;
    if (storages_.size() >= most_) forget_dead();
    storages_.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
  }

  bool contains(const c10::Storage& storage) const { return storages_.count(storage.unsafeGetStorageImpl()) != 0; }

  bool empty() const { return storages_.empty(); }

  void clear() { storages_.clear(); }

 private:
  // Nothing can write a dead one. Where a graph outlives many steps, `clear` is not called for long.
  void forget_dead() {
    for (auto place = storages_.begin(); place != storages_.end();) {
      place = place->second.expired() ? storages_.erase(place) : std::next(place);
    }
    most_ = std::max(kFew, 2 * storages_.size());
  }

  static constexpr size_t kFew = 1024;
  size_t most_ = kFew;  // before the dead ones are looked for
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

}  // namespace known_storages
