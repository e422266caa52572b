// What the tape knows: contents of storages, the ops that made them, and how tensors see them.
//
// A content is one version of what a storage holds. Whoever may need it owns it: an op that read it owns it through its
// arguments, a saved tensor through its handle, and the tape while the storage lives that an op put it into. It owns the
// op that made it. So there are no cycles, and what nothing needs any more is freed at once.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tape.h"

namespace tape {

struct Content;
struct Entry;
using ContentPtr = c10::intrusive_ptr<Content>;
using WeakContent = c10::weak_intrusive_ptr<Content>;
using EntryPtr = c10::intrusive_ptr<Entry>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Held where a storage enters or leaves a content: a garbage collection on another thread may free saved tensors. Who
// holds it must not wait for Python's lock, whose holder may wait for it: nothing is freed meanwhile, and no weak
// reference is locked. Both may change the references of a storage's Python object.
inline std::mutex& storage_mutex() {
  static std::mutex mutex;
  return mutex;
}

// Return a storage of so many bytes on a device.
inline c10::Storage new_storage(int64_t size_bytes, c10::Device device) {
  return at::empty({size_bytes}, at::TensorOptions().dtype(at::kByte).device(device)).storage();
}

// Return a tensor of bytes over a storage, without a gradient function.
inline at::Tensor bytes_of(c10::Storage storage, int64_t size_bytes) {
  const c10::DispatchKey key = c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                               caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size_bytes});
  return tensor;
}

// Return a copy of the first bytes of a storage, on its device and in the current stream.
inline c10::Storage copy_of(const c10::Storage& source, int64_t size_bytes) {
  c10::Storage copy = new_storage(size_bytes, source.device());
  const int64_t copied_bytes = std::min(size_bytes, static_cast<int64_t>(source.nbytes()));
  if (source.device_type() == c10::kCPU) {
    std::memcpy(copy.mutable_data(), source.data(), static_cast<size_t>(copied_bytes));
    return copy;
  }
  const at::AutoDispatchBelowADInplaceOrView guard_of_autograd;
  const c10::impl::ExcludeDispatchKeyGuard guard_of_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Fake}));
  bytes_of(copy, copied_bytes).copy_(bytes_of(source, copied_bytes));
  return copy;
}

// Return a copy of a number that is on the CPU; the program may change it.
inline at::Tensor copy_of_number(const at::Tensor& number) {
  c10::Storage copy = new_storage(static_cast<int64_t>(number.nbytes()), c10::kCPU);
  std::memcpy(copy.mutable_data(), number.const_data_ptr(), number.nbytes());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(copy), number.key_set(), number.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(c10::IntArrayRef());
  return tensor;
}

// How a tensor sees a content: what is needed to make the tensor again on a storage with that content.
struct View {
  ContentPtr content;
  c10::DimVector sizes;
  c10::DimVector strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;

  View(ContentPtr seen, const at::Tensor& tensor)
      : content(std::move(seen)),
        sizes(tensor.sizes().begin(), tensor.sizes().end()),
        strides(tensor.strides().begin(), tensor.strides().end()),
        offset(tensor.storage_offset()),
        dtype(tensor.dtype()),
        keys(tensor.key_set()) {}

  at::Tensor on(c10::Storage storage) const {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return tensor;
  }
};

struct Argument {
  // Of a tensor that the op writes, a replay writes a copy. Of one that it overwrites, it writes a new one.
  enum class Kind : int8_t { kValue, kTensor, kList, kScratch, kWritten, kOverwritten };
  Kind kind = Kind::kValue;
  c10::IValue value;                       // of a list: an empty one of its type
  std::vector<std::optional<View>> views;  // of a tensor: one. Empty where a list has no tensor.
};

// One recorded op.
struct Entry : c10::intrusive_ptr_target {
  Entry(const c10::OperatorHandle& handle, c10::DispatchKeySet keys)
      : op(handle), below(keys), local(c10::impl::tls_local_dispatch_key_set()) {
    local.included_ = local.included_.remove(c10::DispatchKey::PythonTLSSnapshot);
  }

  c10::OperatorHandle op;
  c10::DispatchKeySet below;             // which kernel ran
  c10::impl::LocalDispatchKeySet local;  // what was switched on and off then: autocast, for ops that call others
  bool grad_enabled = false;
  bool writes = false;  // its one output is what it has written
  int64_t need_bytes = 0;
  std::vector<Argument> arguments;
  std::vector<WeakContent> outputs;
  at::Generator generator;  // from which it draws, and the state of that then
  at::Tensor random_state;

  template <typename Function>
  void for_each_source(const Function& function) const {
    for (const Argument& argument : arguments) {
      for (const std::optional<View>& view : argument.views) {
        if (view.has_value() && view->content) function(view->content.get());
      }
    }
  }
};

// Free an op. Its arguments may own the last references to contents, these to their ops, and so on: thousands of them
// must not be freed by recursion.
inline void bury(EntryPtr entry) {
  thread_local std::vector<EntryPtr>* waiting = nullptr;
  if (waiting != nullptr) {
    waiting->push_back(std::move(entry));
    return;
  }
  std::vector<EntryPtr> all;
  all.push_back(std::move(entry));
  waiting = &all;
  while (!all.empty()) {
    EntryPtr next = std::move(all.back());
    all.pop_back();
    next.reset();
  }
  waiting = nullptr;
}

// [Note: what the engine adds to]
// In a backward, the engine adds a gradient to another one in place if it is the only owner of that one's storage. This
// storage may be one that was saved, or made in the forward, if the backward of a custom Function returns it. A weak
// reference does not keep it from that. So once the forward is over, a content is where the tape holds it, and nowhere else:
// a storage that others hold may have been written.
using IsForwardOver = std::shared_ptr<std::atomic<bool>>;  // of one step

struct Content : c10::intrusive_ptr_target {
  Content(int64_t order, const c10::Storage& storage, IsForwardOver is_over)
      : id(order),
        size_bytes(static_cast<int64_t>(storage.nbytes())),
        weak(storage.getWeakStorageImpl()),
        is_forward_over(std::move(is_over)) {}

  const int64_t id;          // rises in the order of creation
  const int64_t size_bytes;
  EntryPtr op;               // makes it again; null: it is held as long as anything needs it
  size_t output_index = 0;
  std::atomic<int64_t> num_saved{0};  // saved tensors that see it
  std::optional<c10::VariableVersion> counter;  // shows writes that the tape does not see
  uint32_t version = 0;
  std::optional<WeakTensor> witness;  // the program's tensor with this counter, if the content has no op

  // A storage that has it, or an empty one. See [Note: what the engine adds to].
  c10::Storage resident() const { return storage_that_has_it(*is_forward_over); }

  // Return whether a storage has it, without a reference to that.
  bool is_resident() const {
    const std::lock_guard<std::mutex> guard(storage_mutex());
    return strong_ || (!*is_forward_over && !weak.expired());
  }

  bool is_held() const {
    const std::lock_guard<std::mutex> guard(storage_mutex());
    return static_cast<bool>(strong_);
  }

  void hold(const c10::Storage& storage) {
    c10::Storage held = storage;  // what it held is freed after the mutex
    const std::lock_guard<std::mutex> guard(storage_mutex());
    std::swap(held, strong_);
    weak = storage.getWeakStorageImpl();
  }

  // It is in a storage that others hold.
  void pass(const c10::Storage& storage) {
    const std::lock_guard<std::mutex> guard(storage_mutex());
    weak = storage.getWeakStorageImpl();
  }

  void release() {
    c10::Storage last;  // freed after the mutex: that may run Python
    const std::lock_guard<std::mutex> guard(storage_mutex());
    std::swap(last, strong_);
  }

  // The storage gets another content. Saved tensors see that one: `successor`.
  void end() {
    c10::Storage storage = storage_that_has_it(false), last;  // freed after the mutex
    counter.reset();
    const std::lock_guard<std::mutex> guard(storage_mutex());
    if (num_saved > 0) std::swap(successor, storage);
    std::swap(last, strong_);
    weak.reset();
  }

  // One saved tensor less sees it.
  void unsave() {
    c10::Storage last_strong, last_successor;  // freed after the mutex: that may run Python
    const std::lock_guard<std::mutex> guard(storage_mutex());
    if (--num_saved > 0) return;
    if (op) std::swap(last_strong, strong_);
    std::swap(last_successor, successor);
  }

  // Let the version of a tensor on it show writes.
  void watch(const at::Tensor& tensor) {
    counter = tensor.unsafeGetTensorImpl()->version_counter();
    version = counter->current_version();
    witness.emplace(tensor.getIntrusivePtr());
  }

  // Return the tensor by whose version it is watched; an undefined one if there is none, or it has died.
  at::Tensor watched() const { return witness.has_value() ? at::Tensor(witness->lock()) : at::Tensor(); }

  // Return whether a write was missed that changed it. A tensor that has exchanged its storage since (`set_`,
  // `.data = other`) counts that, and writes to the other one.
  bool is_changed() const {
    if (!counter.has_value() || !counter->enabled() || counter->current_version() == version) return false;
    const at::Tensor tensor = watched();
    return !tensor.defined() || is_on(tensor, resident());
  }

  static bool is_on(const at::Tensor& tensor, const c10::Storage& storage) {
    return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  }

  void release_resources() override {
    strong_ = successor = c10::Storage();
    if (op) bury(std::move(op));
  }

  c10::Storage successor;  // what saved tensors see after a write that they follow

 private:
  c10::Storage storage_that_has_it(bool must_be_held) const {
    std::unique_lock<std::mutex> guard(storage_mutex());
    if (strong_ || must_be_held) return strong_;
    const auto seen = weak;
    guard.unlock();
    auto storage = seen.lock();
    return storage ? c10::Storage(std::move(storage)) : c10::Storage();
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> weak;
  c10::Storage strong_;
  const IsForwardOver is_forward_over;
};

inline std::string cannot_be_made(const Content& content) {
  return "torchdelta: a content of " + std::to_string(content.size_bytes) + " bytes cannot be made again";
}

class NativeSave final : public Save {
 public:
  NativeSave(const at::Tensor& tensor, ContentPtr content, int64_t number, int64_t step)
      : view(std::move(content), tensor),
        counter_(tensor.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        device_(tensor.device()),
        number_(number),
        step_(step) {
    if (view.content) ++view.content->num_saved;
  }

  ~NativeSave() override { unsave(); }

  int64_t number() const override { return number_; }
  bool is_unmodified() const override { return counter_.current_version() == version_; }
  uint32_t version() const override { return version_; }
  bool has_content() const override { return view.content.defined(); }

  at::Tensor resident(bool or_empty) const override {
    c10::Storage storage = view.content->successor ? view.content->successor : view.content->resident();
    if (!storage && !or_empty) return at::Tensor();
    if (!storage) {
      storage = c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device_), nullptr, false);
    }
    at::Tensor tensor = view.on(std::move(storage));
    tensor.unsafeGetTensorImpl()->set_version_counter(counter_);
    return tensor;
  }

  void release_resources() override { unsave(); }

  // Return which step of the tape it belongs to.
  int64_t step() const { return step_; }

  View view;

 private:
  void unsave() {
    if (!view.content) return;
    view.content->unsave();
    view.content.reset();
  }

  c10::VariableVersion counter_;
  uint32_t version_;
  c10::Device device_;
  int64_t number_;
  int64_t step_;
};

}  // namespace tape
