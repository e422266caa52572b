// The state and the decisions of an arena, without the allocator around it (arena.cpp).
//
// [Note: the arena]
// An arena belongs to one thread: it is started and stopped there, and also stops when the thread ends or its Python
// object dies. It records the sizes of the thread's allocations in a step, in order, except small ones, and when each
// is freed, on any thread. A plan is an offset for each position of such a sequence. While the sizes of a step match a
// plan, each allocation gets its planned place in one mapped region. Allocations that the plan leaves outside, and all
// others, come from the previous allocator.
//
// Safety does not depend on the plan: a place is given out only if no live block overlaps it, whichever plan placed
// that block, however long ago. A wrong plan only costs allocations from outside (`num_clashes`).
//
// A step that begins like no plan is recorded. Its large blocks are mapped one by one, which is slow but leaves no
// holes: otherwise the steps before the first plan would set the high-water mark of the process. So that steps which
// never repeat do not pay for this every time, it is done for a few steps, and then for one in several planned ones.
//
// A plan is dropped when steps often begin like it and then differ. A sequence that was seen only once is planned only
// as long as such guesses were right often enough. So a program whose steps never repeat soon runs as without an arena.
//
// When a size differs, another plan with the same beginning takes over; without one, the rest of the step is allocated
// outside. Free pages are returned to the system when a smaller plan takes over or no plan fits: then only live blocks
// of the region are resident. A region that is too small, or whose arena has closed, is unmapped with its last block.
//
// It keeps c10's contract for `raw_allocate`: the context equals the data pointer, and there is one fixed deleter. A
// deleter gets the pointer only, so a table behind one lock has the blocks that matter. `filter` shows without the lock
// that a pointer is not in the table: a thread that frees a block got it from the thread that allocated it, so it sees
// the count. So threads without an arena take the lock only to free blocks of threads with one. While the lock is held,
// no other lock is taken and no Python code is called: a Python allocation may start the garbage collector, which frees
// tensors, and their deleter takes the lock.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace {

using Sequence = std::vector<int64_t>;
constexpr int64_t kOutlives = -1;
constexpr size_t kMaxSeen = 4096;
constexpr size_t kLeastLoose = 1 << 18;
constexpr size_t kMost = size_t(1) << 46;  // larger requests go to the previous allocator, which may refuse them
constexpr int64_t kFirstLooseSteps = 16, kPlannedStepsForALooseOne = 8;
constexpr int64_t kFirstGuesses = 16, kPlannedStepsForAGuess = 4;
constexpr int kFirstTrust = 2, kMostTrust = 8;

const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
// Protects all of the following except atomics. Never destroyed, like the table: storages die after static objects.
std::mutex& lock = *new std::mutex;
std::atomic<int64_t> num_regions{0}, region_bytes{0};

struct Region {
  char* start;
  size_t size_bytes;
  std::map<size_t, size_t> live;  // first offset of each block -> the offset after its last byte
  size_t touched{0};              // no page above it is resident
  bool drops{false};              // free pages are returned at once
  bool is_retired{false};         // unmapped with the last block

  static Region* make(size_t size_bytes) {
    void* start = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    num_regions.fetch_add(1);
    region_bytes.fetch_add(static_cast<int64_t>(size_bytes));
    return new Region{static_cast<char*>(start), size_bytes};
  }
  bool is_free(size_t begin, size_t end) const {
    auto after = live.lower_bound(begin);
    if (after != live.end() && after->first < end) return false;
    return after == live.begin() || std::prev(after)->second <= begin;
  }
  void drop(size_t begin, size_t end) {  // whole pages of a free range
    begin = (begin + page - 1) / page * page;
    end = end / page * page;
    if (begin < end) madvise(start + begin, end - begin, MADV_DONTNEED);
  }
  void drop_free(size_t from) {
    if (touched <= from) return;
    size_t begin = from;
    auto block = live.upper_bound(from);
    if (block != live.begin() && std::prev(block)->second > from) begin = std::prev(block)->second;
    for (; block != live.end(); ++block) {
      drop(begin, block->first);
      begin = block->second;
    }
    drop(begin, (touched + page - 1) / page * page);
    touched = begin;
  }
  void put(size_t begin, size_t end) {
    live[begin] = end;
    touched = std::max(touched, end);
  }
  void give_back(size_t begin) {
    auto block = live.find(begin);
    const size_t end = block->second;
    live.erase(block);
    if (is_retired && live.empty()) {
      unmap();
    } else if (drops || is_retired) {
      drop(begin, end);
    }
  }
  void retire() {
    is_retired = true;
    if (live.empty()) unmap();
    else drop_free(0);
  }
  void unmap() {
    munmap(start, size_bytes);
    num_regions.fetch_sub(1);
    region_bytes.fetch_sub(static_cast<int64_t>(size_bytes));
    delete this;
  }
};

struct Plan {
  Sequence sizes, ends, offsets;  // an offset of kOutlives is outside
  size_t capacity_bytes{0};
  int num_made{1};
  int trust{kFirstTrust};  // falls when a step leaves it
};

// The allocations of a step so far. The end of a life is the number of allocations before it; an end in the next step
// is the length of this step plus the number of allocations there.
struct Step {
  int64_t serial{0};
  Sequence sizes, ends;
  int64_t num_clashes{0};
  bool wants_plan{false};
  bool follows_its_like{false};
  bool began_planned{false};
};

// The counts of events, for one arena and for the process.
struct Figures {
  int64_t num_steps{0}, num_planned_steps{0}, num_left_plans{0}, num_placed{0}, num_outside{0}, num_clashes{0};
  int64_t num_plans{0}, num_loose_steps{0};
};
Figures& totals = *new Figures;

struct Place {
  Region* region{nullptr};
  size_t offset{0};
};

struct Arena {
  int64_t num_references{1};  // the Python object, the thread that it is on, and every block in the table
  bool is_on{false};
  size_t least_bytes, max_plans, max_length;
  Region* region{nullptr};
  std::list<std::shared_ptr<Plan>> plans;  // the most recently used first
  std::shared_ptr<Plan> plan;              // of this step, as long as it matches
  Step step, before;
  std::list<Step> ready;       // complete, and to be planned
  Step planning;               // the step whose plan is being made
  bool is_loose{false};        // large blocks of this step are mapped one by one
  std::unordered_set<uint64_t> seen;
  int64_t num_guesses{0};  // plans for sequences that were seen only once
  Figures figures;

  void release() {
    if (--num_references == 0) delete this;
  }

  void count(int64_t Figures::*what, int64_t change = 1) {
    figures.*what += change;
    totals.*what += change;
  }

  // Return the place of the next allocation; a null region means outside. Sets `trims` if the heap should be trimmed.
  Place take(size_t size_bytes, int64_t& index, bool& trims) {
    const auto size = static_cast<int64_t>(size_bytes);
    index = static_cast<int64_t>(step.sizes.size());
    if (!is_on || step.sizes.size() >= max_length) {
      if (plan != nullptr) leave_plan();
      index = -1;
      return {};
    }
    step.sizes.push_back(size);
    step.ends.push_back(index + 1);  // until it is allocated
    if (index == 0) {
      choose(size);
      trims = plan != nullptr && !before.began_planned;
    } else if (plan != nullptr && !fits(*plan, index)) {
      change(index);
    }
    if (plan == nullptr && is_loose && size_bytes >= kLeastLoose) return take_alone(size_bytes);
    if (plan == nullptr || region == nullptr) return {};
    const int64_t offset = plan->offsets[index];
    if (offset == kOutlives) {
      count(&Figures::num_outside);
      return {};
    }
    const auto begin = static_cast<size_t>(offset), end = begin + size_bytes;
    if (end > region->size_bytes || !region->is_free(begin, end)) {
      ++step.num_clashes;
      count(&Figures::num_clashes);
      return {};
    }
    region->put(begin, end);
    count(&Figures::num_placed);
    return {region, begin};
  }

  static Place take_alone(size_t size_bytes) {
    Region* own = Region::make((size_bytes + page - 1) / page * page);
    if (own == nullptr) return {};
    own->put(0, size_bytes);
    own->is_retired = true;
    return {own, 0};
  }

  bool fits(const Plan& candidate, int64_t index) const {
    return static_cast<size_t>(index) < candidate.sizes.size() && candidate.sizes[index] == step.sizes[index];
  }

  void choose(int64_t size) {
    is_loose = false;
    for (auto& candidate : plans) {
      if (candidate->sizes[0] == size) {
        step.began_planned = true;
        return take_over(candidate);
      }
    }
    leave_plan();
    is_loose = figures.num_loose_steps < kFirstLooseSteps + figures.num_planned_steps / kPlannedStepsForALooseOne;
    count(&Figures::num_loose_steps, is_loose);
  }

  void change(int64_t index) {
    for (auto& candidate : plans) {
      if (fits(*candidate, index) && std::equal(step.sizes.begin(), step.sizes.end(), candidate->sizes.begin())) {
        return take_over(candidate);
      }
    }
    count(&Figures::num_left_plans);
    distrust();
    leave_plan();
  }

  void distrust() {
    if (--plan->trust > 0) return;
    plans.remove(plan);
    count(&Figures::num_plans, -1);
  }

  void take_over(const std::shared_ptr<Plan>& candidate) {
    plan = candidate;
    if (region != nullptr && region->size_bytes < plan->capacity_bytes) {
      region->retire();
      region = nullptr;
    }
    if (region == nullptr && plan->capacity_bytes > 0) region = Region::make(plan->capacity_bytes);
    if (region == nullptr) return;
    region->drops = false;
    region->drop_free(plan->capacity_bytes);
  }

  void leave_plan() {
    plan = nullptr;
    if (region == nullptr) return;
    region->drops = true;
    region->drop_free(0);
  }

  void freed(int64_t serial, int64_t index) {
    const auto now = static_cast<int64_t>(step.sizes.size());
    if (serial == step.serial) {
      step.ends[index] = now;
    } else if (serial == before.serial) {
      const auto length = static_cast<int64_t>(before.sizes.size());
      before.ends[index] = now <= index ? length + now : kOutlives;  // freed later: two of them are alive at once
    }
  }

  std::list<std::shared_ptr<Plan>>::iterator find(const Sequence& sizes) {
    return std::find_if(plans.begin(), plans.end(), [&](const auto& known) { return known->sizes == sizes; });
  }

  int cut() {
    count(&Figures::num_steps);
    step.follows_its_like = before.sizes == step.sizes;
    if (before.wants_plan) {
      before.wants_plan = false;
      ready.push_back(std::move(before));
    }
    auto known = find(step.sizes);
    const bool was_planned = plan != nullptr && known != plans.end() && *known == plan;
    if (plan != nullptr && !was_planned) distrust();  // it ended early
    if (known != plans.end()) {
      count(&Figures::num_planned_steps, was_planned);
      if (was_planned) plan->trust = std::min(plan->trust + 2, kMostTrust);
      step.wants_plan = step.num_clashes > 0 && step.follows_its_like && (*known)->num_made < 4;
      plans.splice(plans.begin(), plans, known);
    } else {
      const bool is_new = std::none_of(ready.begin(), ready.end(), [&](auto& s) { return s.sizes == step.sizes; });
      const bool is_seen = seen.count(hash(step.sizes)) > 0;
      const bool may_guess = plans.size() < max_plans &&
                             num_guesses < kFirstGuesses + figures.num_planned_steps / kPlannedStepsForAGuess;
      step.wants_plan =
          is_new && !step.sizes.empty() && step.sizes.size() < max_length && (is_seen || may_guess);
      num_guesses += step.wants_plan && !is_seen;
      if (seen.size() >= kMaxSeen) seen.clear();
      seen.insert(hash(step.sizes));
    }
    plan = nullptr;
    const int64_t serial = step.serial + 1;
    before = std::move(step);
    step = Step{};
    step.serial = serial;
    step.sizes.reserve(before.sizes.size());
    step.ends.reserve(before.sizes.size());
    return !ready.empty() ? 2 : before.wants_plan ? 1 : 0;
  }

  static uint64_t hash(const Sequence& sizes) {
    uint64_t value = 1469598103934665603ull;
    for (int64_t size : sizes) value = (value ^ static_cast<uint64_t>(size)) * 1099511628211ull;
    return value;
  }

  // Take the oldest step to be planned. Merge the ends of an earlier step with the same sizes.
  bool take_ready() {
    if (ready.empty()) return false;
    planning = std::move(ready.front());
    ready.pop_front();
    auto known = find(planning.sizes);
    if (known != plans.end()) {
      for (size_t i = 0; i < planning.ends.size(); ++i) {
        const int64_t other = (*known)->ends[i];
        const bool outlives = planning.ends[i] == kOutlives || other == kOutlives;
        planning.ends[i] = outlives ? kOutlives : std::max(planning.ends[i], other);
      }
    }
    return true;
  }

  void add_plan(Sequence offsets, size_t capacity_bytes) {
    auto made = std::make_shared<Plan>();
    auto known = find(planning.sizes);
    if (known != plans.end()) {
      made->num_made = (*known)->num_made + 1;
      plans.erase(known);
      count(&Figures::num_plans, -1);
    } else if (plans.size() >= max_plans) {
      plans.pop_back();
      count(&Figures::num_plans, -1);
    }
    made->sizes = std::move(planning.sizes);
    made->ends = std::move(planning.ends);
    made->offsets = std::move(offsets);
    made->capacity_bytes = (capacity_bytes + page - 1) / page * page;
    planning = Step{};
    plans.push_front(std::move(made));
    count(&Figures::num_plans);
  }

  void close() {
    is_on = false;
    count(&Figures::num_plans, -static_cast<int64_t>(plans.size()));
    plans.clear();
    ready.clear();
    seen.clear();
    plan = nullptr;
    const int64_t serial = step.serial + 2;  // blocks that are alive now belong to no step any more
    step = before = planning = Step{};
    step.serial = serial;
    before.serial = serial - 1;
    if (region != nullptr) region->retire();
    region = nullptr;
  }
};

}  // namespace
