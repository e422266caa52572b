// A CPU allocator for large blocks that reuses the pages of freed ones, and never holds more than was in use at once.
//
// [Note: pages are moved, not mapped anew]
// The C library's heap keeps pages after the blocks on them were freed, and returns the largest blocks to the system.
// Their pages come back zeroed, one page fault each, which takes longer than a kernel needs to read them. Here the pages
// of a freed block stay, as a *run*: an address range with pages behind it. Runs that touch each other become one. A
// request takes the smallest run that is large enough, and the rest of it stays a run. If none is, the largest runs, and
// last the smallest that fills the block, are moved one behind the other by mremap, which does not touch the content of
// pages. New pages are mapped only when no run is left. So what is held, live blocks and runs together, is at most what
// was live at once.
//
// mremap moves a range within one mapping, and the kernel merges few moved ranges. So a run knows its *segments*: its
// ranges of one mapping each. Moving a segment takes as long as the faults of about ten pages, whatever its size,
// because every processor that runs a thread of this process is interrupted. What is put together is cut again later,
// so segments become smaller from step to step. Before pages are moved, the runs are unmapped if their segments are too
// small, or if there are too many of all segments. Then blocks get new pages, in few large segments.
//
// It is on while a budget runs on CPU, for the blocks of every thread. Otherwise, and for small blocks, it forwards to
// the previous allocator. Its own blocks may be freed at any time. It keeps c10's contract for `raw_allocate`: the
// context equals the data pointer, and there is one fixed deleter.
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/Storage.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t kLeast = size_t{1} << 20;         // smaller blocks are many, and the heap handles them well
constexpr size_t kMost = size_t{1} << 46;          // beyond any machine: the previous allocator raises its error
const uintptr_t kPage = sysconf(_SC_PAGESIZE);
const size_t kGrain = std::max(size_t{1} << 14, static_cast<size_t>(kPage));  // whole pages; 64 KiB on some machines
constexpr size_t kLeastMean = size_t{1} << 18;     // of the sizes of the runs' segments; below it, they are too small
constexpr size_t kFewSegments = 32;                // runs with at most so many segments stay, even if these are small
constexpr size_t kMostSegments = size_t{1} << 14;  // a quarter of the mappings that Linux allows to a process

struct Segment {
  size_t size;
  uint64_t mapping;  // its number: neighbours with the same number are one mapping
};
using Segments = std::vector<Segment>;  // in the order of their addresses

struct Run {
  char* start;
  size_t size;
  Segments segments;
  char* end() const { return start + size; }
};

struct Figures {
  int64_t live{0}, kept{0}, peak{0};  // bytes: of blocks in use, of runs, and the most of both together
  int64_t fresh{0}, moved{0};         // bytes mapped anew, and moved, since the process began
};

std::mutex lock;
std::map<char*, Run>& runs = *new std::map<char*, Run>;  // by address
std::set<std::pair<size_t, char*>>& sizes = *new std::set<std::pair<size_t, char*>>;  // of the runs
std::unordered_map<void*, Run>& blocks = *new std::unordered_map<void*, Run>;
uint64_t num_mappings = 0;  // so far
Figures figures;
size_t num_segments = 0;      // of runs and blocks
size_t num_run_segments = 0;  // of runs
int64_t num_users = 0;
std::atomic<bool> is_on{false};
std::atomic<int64_t> num_blocks{0};
c10::Allocator* previous = nullptr;
c10::DeleterFnPtr previous_deleter = nullptr;

void append(Segments& segments, Segment segment) {
  if (!segments.empty() && segments.back().mapping == segment.mapping) {
    segments.back().size += segment.size;
  } else {
    segments.push_back(segment);
  }
}

Run take_out(std::map<char*, Run>::iterator position) {
  Run run = std::move(runs.extract(position).mapped());
  sizes.erase({run.size, run.start});
  figures.kept -= run.size;
  num_segments -= run.segments.size();
  num_run_segments -= run.segments.size();
  return run;
}

Run take_out(std::set<std::pair<size_t, char*>>::iterator position) { return take_out(runs.find(position->second)); }

// Put the second of two neighbours behind the first.
void join(Run& run, const Run& next) {
  run.size += next.size;
  for (const Segment& segment : next.segments) append(run.segments, segment);
}

void keep(Run run) {
  auto next = runs.lower_bound(run.start);
  if (next != runs.begin() && std::prev(next)->second.end() == run.start) {
    Run before = take_out(std::prev(next));
    join(before, run);
    run = std::move(before);
  }
  if (next != runs.end() && next->first == run.end()) join(run, take_out(next));
  figures.kept += run.size;
  num_segments += run.segments.size();
  num_run_segments += run.segments.size();
  sizes.insert({run.size, run.start});
  char* start = run.start;
  runs.emplace(start, std::move(run));
}

// Give the pages of a range back. Where the kernel allows no more mappings, a range inside one cannot be unmapped: then
// its addresses stay taken, but its pages do not.
void unmap(char* start, size_t size) {
  if (size > 0 && munmap(start, size) != 0) madvise(start, size, MADV_DONTNEED);
}

void unmap_runs() {
  for (const auto& [start, run] : runs) {
    unmap(start, run.size);
    num_segments -= run.segments.size();
  }
  runs.clear();
  sizes.clear();
  figures.kept = 0;
  num_run_segments = 0;
}

// Cut a run after `size` bytes. Return the rest.
Run cut(Run& run, size_t size) {
  Run rest{run.start + size, run.size - size, {}};
  size_t end = 0, i = 0;
  while (end < size) end += run.segments[i++].size;
  if (end > size) {
    rest.segments.push_back({end - size, run.segments[i - 1].mapping});
    run.segments[i - 1].size -= end - size;
  }
  rest.segments.insert(rest.segments.end(), run.segments.begin() + i, run.segments.end());
  run.segments.resize(i);
  run.size = size;
  return rest;
}

bool can_move = true;  // until it has failed once

// Move the pages of a run to an address, and add its segments to those there. Return the bytes moved, and the size of
// the segment that failed (0 if none). Its target may be unmapped by then.
std::pair<size_t, size_t> move(const Run& run, char* target, Segments& segments) {
  size_t done = 0;
  for (const Segment& segment : run.segments) {
    void* there = mremap(run.start + done, segment.size, segment.size, MREMAP_MAYMOVE | MREMAP_FIXED, target + done);
    if (there == MAP_FAILED) return {done, segment.size};
    segments.push_back({segment.size, ++num_mappings});
    done += segment.size;
  }
  return {done, 0};
}

bool map_anew(char* start, size_t size) {
  return mmap(start, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

// Return a new block, with the pages of runs as far as there are any; null if there is no memory for it here.
Run put_together(size_t size) {
  // Without access it counts against no limit of data, which the pages to be moved may have reached.
  void* reserved = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED && !runs.empty()) {  // a limit of addresses (RLIMIT_AS), which the runs count against, too
    unmap_runs();
    reserved = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (reserved == MAP_FAILED) return {nullptr, 0, {}};
  Run block{static_cast<char*>(reserved), size, {}};
  size_t filled = 0;
  while (filled < size && !runs.empty()) {
    auto found = sizes.lower_bound({size - filled, nullptr});  // the smallest that is enough, or the largest
    Run run = take_out(found != sizes.end() ? found : std::prev(found));
    if (run.size > size - filled) keep(cut(run, size - filled));
    const auto [done, failed] = move(run, block.start + filled, block.segments);
    filled += done;
    if (failed != 0) {  // too many mappings, for example
      can_move = false;
      unmap_runs();
      unmap(run.start + done, run.size - done);
      // Another thread may have mapped something where the segment was to go, so that range is never touched again.
      unmap(block.start, filled);
      unmap(block.start + filled + failed, size - filled - failed);
      return {nullptr, 0, {}};
    }
  }
  figures.moved += filled;
  if (filled < size) {
    block.segments.push_back({size - filled, ++num_mappings});
    if (!map_anew(block.start + filled, size - filled)) {
      unmap(block.start, filled);  // the rest may be unmapped already, and may be another thread's by now
      return {nullptr, 0, {}};
    }
    figures.fresh += size - filled;
  }
  return block;
}

// Return whether new pages take less time than moving the runs' small segments, or whether all segments are too many.
bool should_unmap_runs() {
  const size_t kept = figures.kept;
  return num_segments > kMostSegments || (num_run_segments > kFewSegments && kept / num_run_segments < kLeastMean);
}

void* take(size_t size) {
  std::lock_guard<std::mutex> guard(lock);
  if (!is_on.load()) return nullptr;
  Run block;
  auto found = sizes.lower_bound({size, nullptr});
  if (found != sizes.end()) {
    block = take_out(found);
    if (block.size > size) keep(cut(block, size));
  } else {
    if (should_unmap_runs() || !can_move) unmap_runs();
    block = put_together(size);
    if (block.start == nullptr) return nullptr;
  }
  void* start = block.start;
  num_segments += block.segments.size();
  figures.live += size;
  figures.peak = std::max(figures.peak, figures.live + figures.kept);
  blocks.emplace(start, std::move(block));
  num_blocks.fetch_add(1);
  return start;
}

bool is_block(void* pointer) {
  if (num_blocks.load(std::memory_order_acquire) == 0 || reinterpret_cast<uintptr_t>(pointer) % kPage != 0) return false;
  std::lock_guard<std::mutex> guard(lock);
  return blocks.count(pointer) > 0;
}

void give_back(void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  Run block = std::move(blocks.extract(pointer).mapped());
  num_blocks.fetch_sub(1);
  num_segments -= block.segments.size();
  figures.live -= block.size;
  if (is_on.load()) {
    keep(std::move(block));
  } else {
    unmap(block.start, block.size);
  }
}

void delete_block(void* pointer) {
  if (pointer == nullptr) return;
  if (is_block(pointer)) {
    c10::profiledCPUMemoryReporter().Delete(pointer);  // before the place can be used again
    give_back(pointer);
  } else {
    previous_deleter(pointer);
  }
}

// Unmap what no block uses. Return its bytes.
int64_t release_runs() {
  std::lock_guard<std::mutex> guard(lock);
  const int64_t kept = figures.kept;
  unmap_runs();
  return kept;
}

// Allocate below. If there is no memory left, the runs may be what takes it.
void* allocate_below(size_t size_bytes) {
  try {
    return previous->raw_allocate(size_bytes);
  } catch (const std::exception&) {
    if (release_runs() == 0) throw;
  }
  return previous->raw_allocate(size_bytes);
}

struct CachingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    void* pointer = nullptr;
    if (is_on.load(std::memory_order_acquire) && size_bytes >= kLeast && size_bytes < kMost) {
      pointer = take((size_bytes + kGrain - 1) / kGrain * kGrain);
      if (pointer != nullptr) c10::profiledCPUMemoryReporter().New(pointer, size_bytes);
    }
    if (pointer == nullptr) pointer = allocate_below(size_bytes);
    return {pointer, pointer, &delete_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_block; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    default_copy_data(target, source, size_bytes);
  }
};

CachingAllocator& caching = *new CachingAllocator;
constexpr const char* kAllocator = "c10::Allocator";

// A child of fork() has one thread only: no other thread may hold the lock during the fork.
void take_lock() { lock.lock(); }
void give_lock() { lock.unlock(); }
void forget_in_child() {
  num_users = 0;
  is_on = false;
  unmap_runs();
  lock.unlock();
}

PyObject* install_before(PyObject*, PyObject* capsule) {
  auto* found = static_cast<c10::Allocator*>(PyCapsule_GetPointer(capsule, kAllocator));
  if (found == nullptr) return nullptr;
  if (previous == nullptr && found != &caching) {
    if (found->raw_deleter() == nullptr) {
      PyErr_SetString(PyExc_RuntimeError, "the current CPU allocator has no raw deleter");
      return nullptr;
    }
    previous_deleter = found->raw_deleter();
    previous = found;
    pthread_atfork(take_lock, give_lock, forget_in_child);
  }
  return PyCapsule_New(&caching, kAllocator, nullptr);
}

PyObject* start(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> guard(lock);
  if (num_users++ == 0) figures.peak = figures.live + figures.kept;
  is_on = previous != nullptr;
  Py_RETURN_NONE;
}

PyObject* stop(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> guard(lock);
  if (num_users > 0 && --num_users == 0) {
    is_on = false;
    unmap_runs();
    figures.peak = figures.live;
  }
  Py_RETURN_NONE;
}

PyObject* release(PyObject*, PyObject*) { return PyLong_FromLongLong(release_runs()); }

// Storages that Python makes come from the C library, whatever the current allocator is: this one does not.
PyObject* new_storage(PyObject*, PyObject* argument) {
  const size_t size_bytes = PyLong_AsSize_t(argument);
  if (size_bytes == static_cast<size_t>(-1) && PyErr_Occurred()) return nullptr;
  HANDLE_TH_ERRORS
  c10::Allocator* current = c10::GetCPUAllocator();
  return THPStorage_Wrap(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size_bytes, current->allocate(size_bytes), current, true));
  END_HANDLE_TH_ERRORS
}

std::pair<Figures, size_t> copy_figures() {
  std::lock_guard<std::mutex> guard(lock);
  return {figures, num_segments};
}

PyObject* get_figures(PyObject*, PyObject*) {
  const auto [now, segments] = copy_figures();  // making a dict may free blocks, which takes the lock
  return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:n}", "live_bytes", now.live, "kept_bytes", now.kept,  //
                       "peak_bytes", now.peak, "fresh_bytes", now.fresh, "moved_bytes", now.moved,  //
                       "num_segments", static_cast<Py_ssize_t>(segments));
}

PyMethodDef module_methods[] = {
    {"install_before", install_before, METH_O, "Put it over the allocator in a capsule. Return a capsule with it."},
    {"start", start, METH_NOARGS, "Allocate large blocks here until a `stop` for each `start`."},
    {"stop", stop, METH_NOARGS, "Unmap what no block uses, once nobody uses this allocator."},
    {"release", release, METH_NOARGS, "Unmap what no block uses. Return its bytes."},
    {"new_storage", new_storage, METH_O, "Return a storage of some bytes from the current CPU allocator."},
    {"figures", get_figures, METH_NOARGS, "Return what is held, and what was mapped and moved."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchdelta_caching", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_torchdelta_caching() { return PyModule_Create(&module); }
