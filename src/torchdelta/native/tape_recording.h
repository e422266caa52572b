// The tape itself: what it records of a step, drops and replays. See tape.cpp.
#pragma once
#include <Python.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "above_autograd.h"
#include "home_stream.h"
#include "numeric_settings.h"
#include "outside_memory.h"
#include "tape.h"
#include "tape_chain.h"
#include "tape_content.h"

namespace tape {

using Clock = std::chrono::steady_clock;

constexpr size_t kTraining = 5;

// What leaves and returns at which saved tensor. All contents are named by the numbers of their first saved tensors.
struct Lane {
  std::unordered_map<int64_t, std::vector<int64_t>> drops;                 // by saved tensor
  std::unordered_map<int64_t, std::vector<std::vector<int64_t>>> replays;  // groups, by the saved tensor unpacked
};

// All has been handed over to Python, which `ensure` has asked for room: caught by every function that gate.cpp or
// saved_hooks.cpp call.
struct HandedOver {};
// There is no room. A replay that can wait is left out.
struct NotNow : std::runtime_error {
  NotNow() : std::runtime_error("torchdelta: there is no room to keep a tensor that is about to be written") {}
};

struct WithoutInterpreter {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutInterpreter() { PyEval_RestoreThread(state); }
};

class NativeTape final : public Tape, private ChainOwner {
 public:
  NativeTape(c10::Device where, const std::atomic<int64_t>* live, PyObject* make_room, PyObject* raise_changed,
             PyObject* hand_over)
      : ChainOwner(where), stream_(where), live_(live), make_room_(make_room), raise_changed_(raise_changed), hand_over_(hand_over) {}

  // -- a step

  void begin(Lane lane, int64_t most_bytes) {
    clear();
    lane_ = std::move(lane);
    most_bytes_ = most_bytes;
    environment_ = environment_of(device);
    is_forward_over_ = std::make_shared<std::atomic<bool>>(false);
    stream_.begin();
    is_on_ = true;
  }

  // Backward begins: no op is recorded any more. `slots_` stays: Python code may still write what replays read.
  void end_forward() {
    *is_forward_over_ = true;
    pinned_.clear();
  }

  void clear() {
    ++epoch_;
    slots_.clear();
    pinned_.clear();
    saved_.clear();
    lane_ = Lane();
    is_on_ = false;
  }

  // Return what was done since the last call.
  PyObject* take_counts() {
    PyObject* counts = Py_BuildValue("LLLLLd", static_cast<long long>(num_replayed),
                                     static_cast<long long>(replayed_bytes), num_saved_, num_dropped_, dropped_bytes_,
                                     replay_s_);
    num_replayed = replayed_bytes = num_saved_ = num_dropped_ = dropped_bytes_ = 0;
    replay_s_ = 0;
    return counts;
  }

  // -- forward

  bool record(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack,
              int64_t need_bytes, int64_t recorded) override {
    try {
      return try_to_record(op, below, stack, need_bytes, recorded);
    } catch (const HandedOver&) {  // before the op ran
      return false;
    }
  }

  bool try_to_record(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack,
                     int64_t need_bytes, int64_t recorded) {
    if (!is_on_ || c10::InferenceMode::is_enabled() || environment_of(device) != environment_) {
      before_write(op, *stack);
      return false;
    }
    const size_t begin = stack->size() - op.schema().arguments().size();
    if ((recorded & (kWrites | kOverwrites)) != 0 && !(*stack)[begin].isTensor()) {
      before_write(op, *stack);
      return false;
    }
    if ((recorded & kIsConstant) != 0 && !c10::GradMode::is_enabled()) {  // as `Capturer.capture` in Python
      before_write(op, *stack);
      return false;
    }
    const bool hides = (recorded & kHasStatistics) != 0 && (*stack)[begin + kTraining].toBool();
    EntryPtr entry = c10::make_intrusive<Entry>(op, below);
    entry->grad_enabled = c10::GradMode::is_enabled();
    entry->need_bytes = need_bytes;
    entry->writes = (recorded & (kWrites | kOverwrites)) != 0;
    entry->arguments.reserve(stack->size() - begin);
    if (!capture_all(*stack, begin, recorded, hides, entry.get()) || reads_what_it_writes(*entry)) {
      before_write(op, *stack);
      return false;
    }
    if ((recorded & kIsRandom) != 0) {
      entry->generator = generator_of(*stack, begin);
      const std::lock_guard<std::mutex> guard(entry->generator.mutex());
      entry->random_state = entry->generator.get_state();
    }
    if (hides) {
      for (const size_t position : {kFirstStatistics, kFirstStatistics + 1}) end_content((*stack)[begin + position]);
    }
    const at::Tensor written = entry->writes ? (*stack)[begin].toTensor() : at::Tensor();
    if (written.defined()) end_content(written);
    op.redispatchBoxed(below, stack);
    for (size_t index = begin; index < stack->size(); ++index) {
      if ((*stack)[index].isTensor()) note_made((*stack)[index].toTensor(), entry, index - begin);
    }
    prune();
    return true;
  }

  void before_write(const c10::OperatorHandle& op, const torch::jit::Stack& stack) override {
    if (slots_.empty() || !writes_arguments(op)) return;
    try {
      for_each_written(op, stack, [this](const c10::IValue& value) { end_content(value); });
    } catch (const HandedOver&) {
    }
  }

  // As `before_write`, for one tensor that Python code is about to write in a backward.
  void before_write_of(const at::Tensor& tensor) {
    try {
      end_content(tensor);
    } catch (const HandedOver&) {
    }
  }

  SavePtr save(const at::Tensor& tensor, int64_t number, bool is_kept) override {
    ContentPtr content;
    if (!is_kept && is_on_) {
      content = find(tensor.storage().unsafeGetStorageImpl());
      if (content && !content->op) content.reset();
    }
    auto save = c10::make_intrusive<NativeSave>(tensor, content, number, epoch_);
    if (content) {
      ++num_saved_;
      content->hold(tensor.storage());
      content->counter = tensor.unsafeGetTensorImpl()->version_counter();
      content->version = save->version();
      saved_.insert_or_assign(number, WeakContent(content));
    }
    drop_at(number);
    prune();
    return save;
  }

  void drop_at(int64_t number) {
    const auto found = lane_.drops.find(number);
    if (found == lane_.drops.end()) return;
    for (const int64_t first : found->second) {
      const ContentPtr content = saved(first);
      if (!content || !content->op || !content->is_held()) continue;
      dropped_bytes_ += content->size_bytes;
      ++num_dropped_;
      content->release();
    }
  }

  // -- backward

  void before_unpack(const SavePtr& save) override {
    if (static_cast<NativeSave*>(save.get())->step() == epoch_) replay_at(save->number());
  }

  void replay_at(int64_t number) {
    const auto found = lane_.replays.find(number);
    if (found == lane_.replays.end()) return;
    const auto groups = std::move(found->second);
    lane_.replays.erase(found);
    const OutsideInferenceMode guard_of_mode;
    for (const std::vector<int64_t>& group : groups) {
      std::vector<ContentPtr> missing;
      for (const int64_t first : group) {
        ContentPtr content = saved(first);
        if (content && content->num_saved > 0 && content->op && !content->successor && !content->resident()) {
          missing.push_back(std::move(content));
        }
      }
      try {
        if (!missing.empty() && is_as_in_forward()) run_chain(missing, false);
      } catch (const HandedOver&) {
        return;
      } catch (const NotNow&) {  // `unpack` makes each of them again, and raises; not all of them may be needed
      } catch (const c10::Error&) {
      }
    }
  }

  at::Tensor unpack(const SavePtr& save) override {
    auto* native = static_cast<NativeSave*>(save.get());
    const ContentPtr content = native->view.content;
    if (!content) return at::Tensor();
    const OutsideInferenceMode guard_of_mode;
    c10::Storage storage = content->successor ? content->successor : content->resident();
    try {
      if (!storage && !is_as_in_forward()) throw NotNow();  // Python replays under the earlier settings, and at home
      if (!storage) storage = run_chain({content}, true);
    } catch (const HandedOver&) {
      return at::Tensor();
    } catch (const NotNow&) {
      call(hand_over_, nullptr);
      return at::Tensor();
    } catch (const c10::Error&) {  // Python tries once more, and raises what it raises always
      call(hand_over_, nullptr);
      return at::Tensor();
    }
    TORCH_CHECK(static_cast<int64_t>(storage.nbytes()) >= content->size_bytes,
                "the content of a saved tensor of " + std::to_string(content->size_bytes) +
                    " bytes is lost: its storage was resized to " + std::to_string(storage.nbytes()) +
                    " bytes before backward; resize it after backward");
    return native->view.on(std::move(storage));
  }

 private:
  // What a storage held when the tape last saw it. The weak reference keeps its address from being another's.
  struct Slot {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    WeakContent content;
  };

  bool is_as_in_forward() const { return stream_.is_current() && environment_of(device) == environment_; }

  ContentPtr find(const c10::StorageImpl* storage) const {
    const auto found = slots_.find(storage);
    return found != slots_.end() ? found->second.content.lock() : ContentPtr();
  }

  ContentPtr saved(int64_t number) const {
    const auto found = saved_.find(number);
    return found != saved_.end() ? found->second.lock() : ContentPtr();
  }

  ContentPtr new_content(const c10::Storage& storage) {
    ContentPtr content = c10::make_intrusive<Content>(next_id_++, storage, is_forward_over_);
    slots_.insert_or_assign(storage.unsafeGetStorageImpl(), Slot{storage.getWeakStorageImpl(), WeakContent(content)});
    return content;
  }

  // Return whether the tape may record what is done to a tensor.
  bool is_own(const at::Tensor& tensor) const {
    return is_plain(tensor) && tensor.has_storage() && tensor.device() == device;
  }

  std::optional<View> view_of(const at::Tensor& tensor) {
    if (!is_own(tensor)) return std::nullopt;
    const c10::Storage& storage = tensor.storage();
    ContentPtr content = find(storage.unsafeGetStorageImpl());
    if (!content) {
      if (is_outside_memory(tensor, outside_deleter_)) return std::nullopt;
      content = new_content(storage);
      content->hold(storage);
      if (tensor.is_leaf()) content->watch(tensor);  // of another tensor the version may be that of an alias
    }
    return View(std::move(content), tensor);
  }

  at::Generator generator_of(const torch::jit::Stack& stack, size_t begin) const {
    for (size_t index = begin; index < stack.size(); ++index) {
      if (stack[index].isGenerator()) return stack[index].toGenerator();
    }
    return at::globalContext().defaultGenerator(device);
  }

  // Capture the arguments of an op. Return false if it cannot be replayed with them.
  bool capture_all(const torch::jit::Stack& stack, size_t begin, int64_t recorded, bool hides, Entry* entry) {
    for (size_t index = begin; index < stack.size(); ++index) {
      const size_t position = index - begin;
      const bool is_scratch = hides && (position == kFirstStatistics || position == kFirstStatistics + 1);
      if (position > 0 || !entry->writes) {
        if (!capture(stack[index], is_scratch, entry)) return false;
      } else if (!capture_written(stack[index].toTensor(), (recorded & kOverwrites) != 0, entry)) {
        return false;
      }
    }
    return true;
  }

  // Return whether an op reads the storage that it writes by another argument, too: a replay would have to give both the
  // same copy. Python does that.
  bool reads_what_it_writes(const Entry& entry) const {
    if (!entry.writes) return false;
    const bool reads_it = entry.arguments.front().kind == Argument::Kind::kWritten;
    const Content* written = reads_it ? entry.arguments.front().views.front()->content.get() : nullptr;
    int num_reads = 0;
    entry.for_each_source([&num_reads, written](const Content* source) { num_reads += source == written; });
    return num_reads > (reads_it ? 1 : 0);
  }

  // A replay needs the content that the op writes to, unless the op overwrites all of the storage.
  bool capture_written(const at::Tensor& tensor, bool is_overwritten, Entry* entry) {
    if (!is_own(tensor)) return false;
    Argument argument;
    if (is_overwritten) {
      if (tensor.nbytes() != tensor.storage().nbytes() || !tensor.is_non_overlapping_and_dense()) return false;
      if (is_outside_memory(tensor, outside_deleter_)) return false;
      argument.kind = Argument::Kind::kOverwritten;
      argument.views.emplace_back(View(ContentPtr(), tensor));
    } else {
      ContentPtr content = find(tensor.storage().unsafeGetStorageImpl());
      if (!content || !content->op) return false;
      argument.kind = Argument::Kind::kWritten;
      argument.views.emplace_back(View(std::move(content), tensor));
    }
    entry->arguments.push_back(std::move(argument));
    return true;
  }

  bool capture(const c10::IValue& value, bool is_scratch, Entry* entry) {
    Argument argument;
    if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // a number of the program: nothing writes it
        argument.value = at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(0, false));
      } else if (!device.is_cpu() && tensor.is_cpu() && tensor.dim() == 0 && is_plain(tensor)) {
        argument.value = copy_of_number(tensor);
      } else if (is_scratch) {
        argument.kind = Argument::Kind::kScratch;
        argument.views.emplace_back(View(ContentPtr(), tensor));
      } else {
        std::optional<View> view = view_of(tensor);
        if (!view.has_value()) return false;
        argument.kind = Argument::Kind::kTensor;
        argument.views.push_back(std::move(view));
      }
    } else if (value.isList() && holds_tensor(value)) {
      argument.kind = Argument::Kind::kList;
      argument.value = c10::impl::GenericList(value.toList().elementType());
      for (const c10::IValue& item : value.toListRef()) {
        const bool has_tensor = item.isTensor() && item.toTensor().defined();
        argument.views.push_back(has_tensor ? view_of(item.toTensor()) : std::nullopt);
        if (has_tensor && !argument.views.back().has_value()) return false;
      }
    } else {
      argument.value = value;
    }
    entry->arguments.push_back(std::move(argument));
    return true;
  }

  static bool holds_tensor(const c10::IValue& list) {
    if (list.isIntList() || list.isBoolList() || list.isDoubleList()) return false;
    for (const c10::IValue& item : list.toListRef()) {
      if (item.isTensor()) return true;
    }
    return false;
  }

  void note_made(const at::Tensor& tensor, const EntryPtr& entry, size_t index) {
    if (!is_own(tensor) || find(tensor.storage().unsafeGetStorageImpl())) return;
    ContentPtr content = new_content(tensor.storage());
    content->op = entry;
    content->output_index = index;
    entry->outputs.emplace_back(content);
    pinned_.push_back(std::move(content));
  }

  // Give up contents whose storages have died, unless something still needs them.
  void prune() {
    pinned_.erase(std::remove_if(pinned_.begin(), pinned_.end(),
                                 [](const ContentPtr& content) { return !content->is_resident(); }),
                  pinned_.end());
  }

  void end_content(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      for_each_part(value.toTensor(), [this](const at::Tensor& tensor) {
        if (tensor.defined() && tensor.has_storage()) end_content_of(tensor.storage().unsafeGetStorageImpl());
      });
    } else if (value.isList() && holds_tensor(value)) {
      for (const c10::IValue& item : value.toListRef()) end_content(item);
    }
  }

  void end_content_of(const c10::StorageImpl* storage) {
    const ContentPtr content = find(storage);
    if (content && content->op) {
      content->end();
    } else if (content) {  // replays read it, and it cannot be made again
      ensure(content->size_bytes, false);
      stream_.run_at_home([&content] { content->hold(copy_of(content->resident(), content->size_bytes)); });
      content->counter.reset();
    }
    slots_.erase(storage);  // last: where the copy failed, the next write tries again
  }

  // -- what a chain asks

  void ensure(int64_t size_bytes, bool is_optional) {
    if (live_->load(std::memory_order_relaxed) + size_bytes <= most_bytes_) return;
    const int64_t epoch = epoch_;
    const WithInterpreter guard;
    PyObject* arguments = Py_BuildValue("(LO)", static_cast<long long>(size_bytes), is_optional ? Py_True : Py_False);
    const bool has_room = call(make_room_, arguments);
    if (epoch_ != epoch) throw HandedOver();
    if (!has_room) throw NotNow();
  }

  void make_room(int64_t size_bytes, bool is_optional) override { ensure(size_bytes, is_optional); }

  void raise_changed(const Content& content, bool is_optional) override {
    if (is_optional) throw NotNow();
    call(raise_changed_,
         Py_BuildValue("(LII)", static_cast<long long>(content.size_bytes), content.counter->current_version(),
                       content.version));
  }

  // Python code may write the new storage as well.
  void on_replayed(const ContentPtr& content, const c10::Storage& storage) override {
    slots_.insert_or_assign(storage.unsafeGetStorageImpl(), Slot{storage.getWeakStorageImpl(), WeakContent(content)});
  }

  void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) override {
    const WithoutInterpreter guard;
    op.redispatchBoxed(below, stack);
  }

  // Call a function, and return whether its answer is true. Takes the arguments; null stands for none.
  static bool call(PyObject* function, PyObject* arguments) {
    const AboveAutograd guard_of_keys;
    PyObject* answer = PyObject_CallObject(function, arguments);
    Py_XDECREF(arguments);
    if (answer == nullptr) throw python_error();
    const bool is_true = PyObject_IsTrue(answer) == 1;
    Py_DECREF(answer);
    return is_true;
  }

  c10::Storage run_chain(std::vector<ContentPtr> targets, bool keeps_others) {
    const Clock::time_point began = Clock::now();
    Content* first = targets.front().get();
    Chain chain(this, std::move(targets), keeps_others);
    chain.run();
    replay_s_ += std::chrono::duration<double>(Clock::now() - began).count();
    return chain.storage_of(first);
  }

  HomeStream stream_;
  const c10::DeleterFnPtr outside_deleter_ = outside_deleter();
  const std::atomic<int64_t>* live_;
  PyObject* make_room_;      // (size_bytes, is_optional): whether there is room
  PyObject* raise_changed_;  // (size_bytes, version, expected version): raises
  PyObject* hand_over_;
  Lane lane_;
  int64_t most_bytes_ = 0;
  bool is_on_ = false;
  int64_t epoch_ = 0;
  int64_t next_id_ = 0;
  Environment environment_{};
  IsForwardOver is_forward_over_ = std::make_shared<std::atomic<bool>>(false);
  std::unordered_map<const c10::StorageImpl*, Slot> slots_;
  std::vector<ContentPtr> pinned_;  // made by ops, while their storages live
  std::unordered_map<int64_t, WeakContent> saved_;
  long long num_saved_ = 0;
  long long dropped_bytes_ = 0;
  long long num_dropped_ = 0;
  double replay_s_ = 0;
};

}  // namespace tape
