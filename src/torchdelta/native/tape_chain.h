// Replays a chain of recorded ops to make contents again. It does what runtime/memory/replay.py does, in the same order:
// each missing op once, in the order of their first run, and what was made on the way is freed after its last use.
#pragma once
#include <ATen/core/List.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tape_content.h"

namespace tape {

// What a chain asks of its tape.
class ChainOwner {
 public:
  virtual ~ChainOwner() = default;
  virtual void make_room(int64_t size_bytes, bool is_optional) = 0;  // throws where there is none
  virtual void raise_changed(const Content& content, bool is_optional) = 0;  // throws
  virtual void on_replayed(const ContentPtr& content, const c10::Storage& storage) = 0;  // it is there now
  virtual void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) = 0;

  const c10::Device device;  // of all contents
  int64_t num_replayed = 0;
  int64_t replayed_bytes = 0;

 protected:
  explicit ChainOwner(c10::Device where) : device(where) {}
};

// Lets a generator draw from an earlier state for a while; nothing if there is none.
class WithRandomState {
 public:
  WithRandomState(at::Generator generator, const at::Tensor& state) : generator_(std::move(generator)) {
    if (!generator_.defined()) return;
    const std::lock_guard<std::mutex> guard(generator_.mutex());
    now_ = generator_.get_state();
    generator_.set_state(state);
  }
  ~WithRandomState() {
    if (!generator_.defined()) return;
    const std::lock_guard<std::mutex> guard(generator_.mutex());
    generator_.set_state(now_);
  }
  WithRandomState(const WithRandomState&) = delete;
  WithRandomState& operator=(const WithRandomState&) = delete;

 private:
  at::Generator generator_;
  at::Tensor now_;
};

// Leaves inference mode, if it is on, as `Quietly` does in Python: what is unpacked has versions.
class OutsideInferenceMode {
 public:
  OutsideInferenceMode() {
    if (c10::InferenceMode::is_enabled()) mode_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> mode_;
};

class Chain {
 public:
  // `keeps_others`: other contents that saved tensors see stay where the chain makes them on its way.
  Chain(ChainOwner* owner, std::vector<ContentPtr> targets, bool keeps_others)
      : owner_(owner), targets_(std::move(targets)), keeps_others_(keeps_others) {
    for (const ContentPtr& target : targets_) states_[target.get()].is_target = true;
  }

  void run() {
    for (Content* content : plan()) {
      State& state = states_[content];
      if (!state.held) {
        c10::Storage storage = content->resident();
        if (storage) {
          keep(content, storage);
        } else {
          replay(content);
        }
      }
      content->op->for_each_source([this](Content* source) {
        State& used = states_[source];
        if (--used.num_uses > 0 || used.is_target) return;
        used.held = c10::Storage();
        if (used.is_passing) source->release();
        used.is_passing = false;
      });
    }
  }

  // The storage of a target after `run`.
  c10::Storage storage_of(Content* target) { return states_[target].held; }

 private:
  struct State {
    int64_t num_uses = 0;  // how often it will still be read
    c10::Storage held;     // a target's, or one that will still be read
    bool is_target = false;
    bool is_passing = false;  // brought back on the way: released after its last use
    bool is_seen = false;
  };

  // Return the missing contents in the order of their first run, and count how often each will be read.
  std::vector<Content*> plan() {
    std::vector<Content*> order;
    std::vector<Content*> waiting;
    for (const ContentPtr& target : targets_) waiting.push_back(target.get());
    while (!waiting.empty()) {
      Content* content = waiting.back();
      waiting.pop_back();
      State& state = states_[content];
      if (state.is_seen) continue;
      state.is_seen = true;
      if (!state.is_target) {
        state.held = content->resident();  // it must not be evicted meanwhile
        if (state.held) continue;
      }
      TORCH_CHECK(content->op, cannot_be_made(*content));
      order.push_back(content);
      content->op->for_each_source([this, &waiting](Content* source) {
        ++states_[source].num_uses;
        waiting.push_back(source);
      });
    }
    std::sort(order.begin(), order.end(), [](const Content* a, const Content* b) { return a->id < b->id; });
    return order;
  }

  bool misses(const State& state, const Content& content) const {
    if (content.resident()) return false;
    return state.is_target || state.num_uses > 0 || (keeps_others_ && content.num_saved > 0);
  }

  void keep(Content* content, const c10::Storage& storage) {
    State& state = states_[content];
    if (state.is_target || state.num_uses > 0) state.held = storage;
  }

  at::Tensor argument(const View& view) {
    Content* content = view.content.get();
    if (content->is_changed()) owner_->raise_changed(*content, !keeps_others_);
    c10::Storage storage = states_[content].held;
    if (!storage) storage = content->resident();
    TORCH_CHECK(storage && static_cast<int64_t>(storage.nbytes()) >= content->size_bytes,
                "torchdelta: an argument of a replay is missing");
    return view.on(std::move(storage));
  }

  // Return a copy of a whole storage, seen as the argument sees it.
  at::Tensor copied(const View& view) {
    const at::Tensor original = argument(view);
    return view.on(copy_of(original.storage(), static_cast<int64_t>(original.storage().nbytes())));
  }

  c10::IValue rebuilt(const Argument& argument_) {
    switch (argument_.kind) {
      case Argument::Kind::kValue:
        return argument_.value;
      case Argument::Kind::kTensor:
        return argument(*argument_.views.front());
      case Argument::Kind::kScratch: {
        const View& view = *argument_.views.front();
        return at::ones(view.sizes, at::TensorOptions().dtype(view.dtype).device(owner_->device));
      }
      case Argument::Kind::kWritten:
        return copied(*argument_.views.front());
      case Argument::Kind::kOverwritten: {
        const View& view = *argument_.views.front();
        return view.on(new_storage(wanted_->size_bytes, owner_->device));
      }
      case Argument::Kind::kList:
        break;
    }
    c10::impl::GenericList list(argument_.value.toList().elementType());
    list.reserve(argument_.views.size());
    for (const std::optional<View>& view : argument_.views) {
      list.push_back(view.has_value() ? c10::IValue(argument(*view)) : c10::IValue());
    }
    return list;
  }

  void replay(Content* wanted) {
    const EntryPtr entry = wanted->op;
    wanted_ = wanted;
    owner_->make_room(entry->need_bytes + (entry->writes ? wanted->size_bytes : 0), !keeps_others_);
    torch::jit::Stack stack;
    {
      const c10::impl::ForceDispatchKeyGuard guard_of_keys(entry->local);
      const c10::AutoGradMode guard_of_grad_mode(entry->grad_enabled);
      for (const Argument& item : entry->arguments) stack.push_back(rebuilt(item));
      const WithRandomState guard_of_state(entry->generator, entry->random_state);
      owner_->run(entry->op, entry->below, &stack);
    }
    ++owner_->num_replayed;
    for (const WeakContent& output : entry->outputs) {
      const ContentPtr content = output.lock();
      if (!content) continue;
      const c10::Storage storage = stack.at(content->output_index).toTensor().storage();
      TORCH_CHECK(static_cast<int64_t>(storage.nbytes()) == content->size_bytes,
                  "torchdelta: recomputing " + entry->op.schema().name() + " gave " + std::to_string(storage.nbytes()) +
                      " bytes, but its first run gave " + std::to_string(content->size_bytes) +
                      " bytes: keep it (decisions='keep')");
      if (content.get() != wanted && !misses(states_[content.get()], *content)) continue;
      if (content->num_saved > 0) {
        content->hold(storage);
      } else {
        content->pass(storage);
      }
      owner_->on_replayed(content, storage);
      owner_->replayed_bytes += content->size_bytes;
      keep(content.get(), storage);
      State& state = states_[content.get()];
      if (!keeps_others_ && !state.is_target) state.is_passing = true;
    }
  }

  ChainOwner* owner_;
  std::vector<ContentPtr> targets_;
  bool keeps_others_;
  Content* wanted_ = nullptr;  // by the running replay
  std::unordered_map<Content*, State> states_;  // the targets own all of these contents
};

}  // namespace tape
