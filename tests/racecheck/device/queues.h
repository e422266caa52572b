// Streams that run their entries later, in an order that a scheduler chooses.
//
// [Note: no GIL]
// Whoever calls lets time pass, and so runs what others have queued: on CPU tensors only, and with the dispatch keys from
// before any mode. A caller may hold the GIL while it waits for the lock, so nobody who has the lock may need the GIL:
// no entry holds a tensor of Python, and the rest of the thread-local state (whose copy would take the GIL where
// saved-tensor hooks are active) stays as it is. The modes of Python go, too: a kernel of the CPU that calls other ops
// would hand them to the mode, which is Python, and which may call the device again in the middle of an entry.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "checker.h"

namespace racecheck {

// A mark in a stream.
struct Mark {
  Key key;
  Clock clock;
  uint64_t epoch;  // marks from before a reset are over
  bool is_reached = false;
  double time_s = 0;
};

// An entry of a stream: something to run, a mark to wait for, or a mark that is reached here.
struct Entry {
  std::function<void()> run;
  std::shared_ptr<Mark> awaited;
  std::shared_ptr<Mark> reached;
  std::string what;
};

struct Stream {
  std::deque<Entry> entries;
  Clock clock;
  double weight = 1;
};

enum class Mode : int {
  kAtOnce = 0,    // an entry has run when the call that queued it returns
  kRandom = 1,    // drawn from a seed
  kScripted = 2,  // nothing runs but what the host waits for; a script says what each question finds
};

// The caller's modes are away while an entry runs: [Note: no GIL].
class NoModes {
 public:
  NoModes() : saved_(c10::impl::TorchDispatchModeTLS::get_state()) {
    c10::impl::TorchDispatchModeTLS::set_state(c10::impl::TorchDispatchModeTLS());
  }
  ~NoModes() { c10::impl::TorchDispatchModeTLS::set_state(std::move(saved_)); }
  NoModes(const NoModes&) = delete;
  NoModes& operator=(const NoModes&) = delete;

 private:
  c10::impl::TorchDispatchModeTLS saved_;
};

class Queues {
 public:
  std::recursive_mutex lock;
  Checker checker;
  Clock host;
  uint64_t num_kernels = 0;
  uint64_t num_marks = 0;
  uint64_t num_questions = 0;
  uint64_t log = 0;  // a hash of all that was queued, allocated and freed, without the questions and their answers

  void set_mode(Mode mode, uint64_t seed) {
    mode_ = mode;
    random_.seed(seed);
    pace_ = std::uniform_int_distribution<int>(0, 3)(random_);
    weights_ = std::uniform_int_distribution<int>(0, 2)(random_);
    for (auto& [_, stream] : streams_) stream.weight = draw_weight();
    log = 0;
  }

  void set_script(std::vector<int> script) {
    script_ = std::move(script);
    answers_.clear();
    keys_.clear();
  }
  const std::vector<int>& answers() const { return answers_; }
  const std::vector<uint64_t>& keys() const { return keys_; }

  Stream& stream(Key key) {
    const auto found = streams_.find(key);
    if (found != streams_.end()) return found->second;
    auto& made = streams_[key];
    made.weight = draw_weight();
    return made;
  }

  // The next tick of a stream: what is queued now comes after all that the host knows.
  Clock& tick(Key key) {
    auto& clock = stream(key).clock;
    merge(clock, host);
    ++clock[key];
    return clock;
  }

  // What work queued in a stream from now on knows, without queueing anything.
  Clock now(Key key) {
    if (key == kHost) return host;
    Clock clock = stream(key).clock;
    merge(clock, host);
    return clock;
  }

  void queue(Key key, std::string what, const std::vector<Range>& ranges, std::function<void()> run) {
    pass_time();
    ++num_kernels;
    what += " #" + std::to_string(num_kernels) + " in stream " + std::to_string(key);
    const auto& clock = tick(key);
    note(1, key);
    checker.reuse(key, clock);
    overwrite_stale(key);
    for (const auto& range : ranges) {
      if (range.start < range.stop) checker.access(range, key, clock, what);
    }
    stream(key).entries.push_back({std::move(run), nullptr, nullptr, std::move(what)});
    if (mode_ == Mode::kAtOnce) run_until_empty(key);
  }

  // Freed memory is overwritten just before the next kernel of its stream, so that a late reader finds NaN.
  void make_stale(Key owner, uintptr_t start, size_t size_bytes) { stale_[owner].push_back({start, size_bytes}); }

  // Memory that is allocated again before that.
  void make_fresh(Key owner, uintptr_t start, size_t size_bytes) {
    auto& stale = stale_[owner];
    stale.erase(
        std::remove_if(
            stale.begin(), stale.end(),
            [&](const auto& one) { return one.first < start + size_bytes && start < one.first + one.second; }),
        stale.end());
  }

  std::shared_ptr<Mark> mark(Key key) {
    pass_time();
    ++num_marks;
    auto made = std::make_shared<Mark>();
    made->key = key;
    made->epoch = epoch_;
    made->clock = tick(key);
    note(2, key);
    stream(key).entries.push_back({nullptr, nullptr, made, "a mark"});
    if (mode_ == Mode::kAtOnce) run_until_empty(key);
    return made;
  }

  void follow(Key key, const std::shared_ptr<Mark>& mark) {
    if (mark->epoch != epoch_) return;
    pass_time();
    merge(tick(key), mark->clock);
    note(3, key);
    note(4, static_cast<Key>(mark->clock[mark->key]));
    if (!mark->is_reached) stream(key).entries.push_back({nullptr, mark, nullptr, "a wait"});
    if (mode_ == Mode::kAtOnce) run_until_empty(key);
  }

  // What a question without blocking finds; a scheduler chooses.
  bool is_reached(const std::shared_ptr<Mark>& mark) {
    if (mark->epoch != epoch_) return true;
    ++num_questions;
    ++asked_since_;
    pass_time();
    if (!mark->is_reached && mode_ == Mode::kScripted) {
      const auto index = answers_.size();
      const int answer = index < script_.size() ? script_[index] : 0;
      keys_.push_back(state_key(*mark));
      answers_.push_back(answer);
      if (answer != 0) run_until(mark);
    }
    if (mark->is_reached) merge(host, mark->clock);
    return mark->is_reached;
  }

  void wait(const std::shared_ptr<Mark>& mark) {
    if (mark->epoch != epoch_) return;
    run_until(mark);
    merge(host, mark->clock);
  }

  void wait_for_stream(Key key) {
    run_until_empty(key);
    merge(host, stream(key).clock);
  }

  // Run all that a stream has queued, without telling the host: the checker learns nothing of it.
  void run_until_empty(Key key) {
    auto& entries = stream(key).entries;
    while (!entries.empty()) run_head(key);
  }

  // Run all that is queued, without telling the host.
  void run_all() {
    for (auto& [key, stream] : streams_) run_until_empty(key);
  }

  void settle() {
    run_all();
    for (auto& [key, stream] : streams_) merge(host, stream.clock);
  }

  // Forget the past: everything is over.
  void reset() {
    settle();
    checker.forget_accesses();
    streams_.clear();
    stale_.clear();
    host.clear();
    ++epoch_;
    log = 0;
    asked_since_ = 0;
  }

  // State from before any mode; the first call is made when the module is loaded.
  static const at::ThreadLocalState& pristine() {
    static const auto& state = *new at::ThreadLocalState;
    return state;
  }

  static c10::impl::LocalDispatchKeySet pristine_keys() {
    static const auto keys = c10::impl::tls_local_dispatch_key_set();
    return keys;
  }

  // The host itself reads or writes memory that a device copies from and to.
  void on_host(const Range& range, const std::string& what) {
    ++host[kHost];
    checker.access(range, kHost, host, what + " by the host");
  }

  void note(uint64_t kind, Key key) {
    asked_since_ = 0;
    for (const uint64_t value : {kind, static_cast<uint64_t>(key)}) {
      log = (log ^ value) * 1099511628211ull + 0x9e3779b97f4a7c15ull;
    }
  }

  void pass_time() {
    if (mode_ != Mode::kRandom) return;
    static const std::vector<int> kPaces[] = {{0, 0, 1, 2, 4}, {0, 0, 0, 1}, {0}, {0, 0, 0, 0, 0, 0, 0, 20}};
    const auto& pace = kPaces[pace_];
    for (int left = pace[random_() % pace.size()]; left > 0; --left) {
      if (!advance()) return;
    }
  }

 private:
  // Run the head of one stream whose head can run.
  bool advance() {
    double total = 0;
    for (auto& [_, stream] : streams_) {
      if (is_ready(stream)) total += stream.weight;
    }
    if (total == 0) return false;
    double drawn = std::uniform_real_distribution<double>(0, total)(random_);
    for (auto& [_, stream] : streams_) {
      if (!is_ready(stream)) continue;
      drawn -= stream.weight;
      if (drawn <= 0) {
        run_first(stream);
        return true;
      }
    }
    return false;
  }

  static bool is_ready(const Stream& stream) {
    return !stream.entries.empty() && (!stream.entries.front().awaited || stream.entries.front().awaited->is_reached);
  }

  // Run the head of a stream, and before it what it waits for.
  void run_head(Key key) {
    auto& found = stream(key);
    while (!is_ready(found)) {
      const auto awaited = found.entries.front().awaited;
      run_until(awaited);
    }
    run_first(found);
  }

  void run_until(const std::shared_ptr<Mark>& mark) {
    while (!mark->is_reached) {
      if (mode_ == Mode::kRandom && random_() % 2 == 0) {
        advance();
      } else {
        run_head(mark->key);
      }
    }
  }

  void run_first(Stream& stream) {
    Entry entry = std::move(stream.entries.front());
    stream.entries.pop_front();
    time_s_ += 1e-6 * static_cast<double>(1 + (mode_ == Mode::kRandom ? random_() % 10 : 0));
    if (entry.run) {
      const c10::InferenceMode plain(false);  // whatever the mode is of the caller that lets time pass
      const c10::impl::ForceDispatchKeyGuard guard(pristine_keys());  // [Note: no GIL]
      const NoModes no_modes;
      try {
        entry.run();
      } catch (const std::exception& error) {
        checker.complain(entry.what + " failed: " + std::string(error.what()).substr(0, 300));
      }
    }
    if (entry.reached) {
      entry.reached->is_reached = true;
      entry.reached->time_s = time_s_;
    }
  }

  void overwrite_stale(Key key) {
    auto& stale = stale_[key];
    for (const auto& [start, size_bytes] : stale) {
      auto run = [start = start, size_bytes = size_bytes] {
        std::memset(reinterpret_cast<void*>(start), 0xFF, size_bytes);
      };
      stream(key).entries.push_back({run, nullptr, nullptr, "the next user of freed memory"});
    }
    stale.clear();
  }

  double draw_weight() {
    static const double kWeights[][4] = {{1, 1, 1, 1}, {1, 0.1, 1, 0.1}, {1, 0.01, 0.1, 10}};
    return kWeights[weights_][random_() % 4];
  }

  // What the rest of a run depends on, as far as the device knows; see explore.py.
  uint64_t state_key(const Mark& mark) {
    uint64_t key = log;
    const auto mix = [&key](uint64_t value) { key = (key ^ value) * 1099511628211ull + 0x9e3779b97f4a7c15ull; };
    for (auto& [stream_key, stream] : streams_) {
      mix(static_cast<uint64_t>(stream_key));
      mix(stream.entries.size());
      mix(tick_in(host, stream_key));
    }
    mix(asked_since_);  // the same question again, further on in the program
    mix(static_cast<uint64_t>(mark.key));
    mix(tick_in(mark.clock, mark.key));
    return key;
  }

  Mode mode_ = Mode::kAtOnce;
  std::mt19937_64 random_{0};
  int pace_ = 0;
  int weights_ = 0;
  std::vector<int> script_;
  std::vector<int> answers_;
  std::vector<uint64_t> keys_;
  std::map<Key, Stream> streams_;
  std::map<Key, std::vector<std::pair<uintptr_t, size_t>>> stale_;
  double time_s_ = 0;
  uint64_t epoch_ = 0;
  uint64_t asked_since_ = 0;  // questions since the log changed
};

inline Queues& queues = *new Queues;  // never destroyed: storages die after static objects do

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace racecheck
