// A CPU allocator that gives a training step the addresses that were planned for it: see [Note: the arena] in arena.h.
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <array>
#include <unordered_map>

#include "arena.h"

namespace {

struct Block {
  Arena* arena;
  Region* region;  // null: allocated outside
  size_t offset;
  int64_t serial, index;
};

std::unordered_map<void*, Block>& blocks = *new std::unordered_map<void*, Block>;
std::array<std::atomic<int32_t>, 1 << 14>& filter = *new std::array<std::atomic<int32_t>, 1 << 14>{};
thread_local Arena* current = nullptr;  // read at every allocation; valid after the thread's objects are destroyed
c10::Allocator* previous = nullptr;
c10::DeleterFnPtr previous_deleter = nullptr;

std::atomic<int32_t>& filter_of(void* pointer) {
  return filter[(reinterpret_cast<uintptr_t>(pointer) >> 6) * 0x9E3779B97F4A7C15ull >> 50];
}

void note(void* pointer, const Block& block) {
  blocks[pointer] = block;
  ++block.arena->num_references;
  filter_of(pointer).fetch_add(1);
}

void finish(const Block& block) {
  block.arena->freed(block.serial, block.index);
  block.arena->release();
}

// Keeps a thread's arena alive until the thread stops it or ends.
struct Holder {
  Arena* arena{nullptr};

  void end() {
    current = nullptr;
    if (arena == nullptr) return;
    std::lock_guard<std::mutex> guard(lock);
    arena->close();
    arena->release();
    arena = nullptr;
  }
  ~Holder() { end(); }
};
thread_local Holder holder;

void delete_block(void* pointer) {
  if (pointer == nullptr) return;
  if (filter_of(pointer).load(std::memory_order_acquire) > 0) {
    Block block{};
    {
      std::lock_guard<std::mutex> guard(lock);
      auto found = blocks.find(pointer);
      if (found != blocks.end()) {
        block = found->second;
        blocks.erase(found);
        filter_of(pointer).fetch_sub(1);
        if (block.region == nullptr) finish(block);
      }
    }
    if (block.region != nullptr) {
      c10::profiledCPUMemoryReporter().Delete(pointer);  // before the place can be reused
      std::lock_guard<std::mutex> guard(lock);
      block.region->give_back(block.offset);
      finish(block);
      return;
    }
  }
  previous_deleter(pointer);
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    Arena* arena = current;
    if (arena == nullptr || size_bytes < arena->least_bytes || size_bytes > kMost) {
      return wrap(previous->raw_allocate(size_bytes));
    }
    int64_t index = 0;
    int64_t serial = 0;
    bool trims = false;
    Place place;
    char* start = nullptr;
    {
      std::lock_guard<std::mutex> guard(lock);
      place = arena->take(size_bytes, index, trims);
      serial = arena->step.serial;
      if (place.region != nullptr) {
        start = place.region->start + place.offset;
        note(start, {arena, place.region, place.offset, serial, index});
        arena->step.ends[index] = kOutlives;
      }
    }
#ifdef __GLIBC__
    if (trims) malloc_trim(0);  // free what the unplanned previous step left in the heap
#endif
    if (start != nullptr) {
      c10::profiledCPUMemoryReporter().New(start, size_bytes);
      return wrap(start);
    }
    void* pointer = previous->raw_allocate(size_bytes);
    if (index >= 0 && pointer != nullptr) {
      std::lock_guard<std::mutex> guard(lock);
      note(pointer, {arena, nullptr, 0, serial, index});
      if (arena->step.serial == serial) arena->step.ends[index] = kOutlives;  // false if another thread has closed it
    }
    return wrap(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_block; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    default_copy_data(target, source, size_bytes);
  }

 private:
  static c10::DataPtr wrap(void* pointer) {
    return {pointer, pointer, &delete_block, c10::Device(c10::DeviceType::CPU)};
  }
};

ArenaAllocator& placing = *new ArenaAllocator;
constexpr const char* kAllocator = "c10::Allocator";

// A child of fork() has one thread only: no other thread may hold the lock during the fork.
void take_lock() { lock.lock(); }
void give_lock() { lock.unlock(); }
void forget_in_child() {
  lock.unlock();
  current = nullptr;
}

bool adopt(c10::Allocator* found) {
  if (found->raw_deleter() == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the current CPU allocator has no raw deleter");
    return false;
  }
  previous = found;
  previous_deleter = found->raw_deleter();
  pthread_atfork(take_lock, give_lock, forget_in_child);
  return true;
}

PyObject* install(PyObject*, PyObject*) {
  if (previous == nullptr) {
    if (!adopt(c10::GetCPUAllocator())) return nullptr;
    c10::SetCPUAllocator(&placing);
  }
  return PyBool_FromLong(c10::GetCPUAllocator() == &placing);
}

PyObject* install_before(PyObject*, PyObject* capsule) {
  auto* found = static_cast<c10::Allocator*>(PyCapsule_GetPointer(capsule, kAllocator));
  if (found == nullptr || (previous == nullptr && found != &placing && !adopt(found))) return nullptr;
  return PyCapsule_New(&placing, kAllocator, nullptr);
}

PyObject* is_allocator(PyObject*, PyObject* capsule) {
  auto* found = capsule == Py_None ? c10::GetCPUAllocator() : PyCapsule_GetPointer(capsule, kAllocator);
  return found == nullptr ? nullptr : PyBool_FromLong(found == &placing);
}

PyObject* as_dict(const Figures& figures) {
  return Py_BuildValue(
      "{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "num_steps", figures.num_steps,  //
      "num_planned_steps", figures.num_planned_steps, "num_left_plans", figures.num_left_plans,  //
      "num_loose_steps", figures.num_loose_steps, "num_placed", figures.num_placed,  //
      "num_outside", figures.num_outside, "num_clashes", figures.num_clashes, "num_plans", figures.num_plans);
}

Figures copy_of(const Figures& figures) {
  std::lock_guard<std::mutex> guard(lock);
  return figures;
}

PyObject* total_figures(PyObject*, PyObject*) { return as_dict(copy_of(totals)); }

PyObject* mapped_bytes(PyObject*, PyObject*) { return PyLong_FromLongLong(region_bytes.load()); }

struct ArenaObject {
  PyObject_HEAD
  Arena* arena;
};

Arena* arena_of(PyObject* self) { return reinterpret_cast<ArenaObject*>(self)->arena; }

PyObject* arena_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  long long least_bytes = 0, max_plans = 0, max_length = 0;
  if (!PyArg_ParseTuple(arguments, "LLL", &least_bytes, &max_plans, &max_length)) return nullptr;
  if (least_bytes < 1 || max_plans < 1 || max_length < 1) {
    PyErr_SetString(PyExc_ValueError, "every limit of an arena must be at least 1");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* arena = reinterpret_cast<ArenaObject*>(self)->arena = new Arena;
  arena->least_bytes = static_cast<size_t>(least_bytes);
  arena->max_plans = static_cast<size_t>(max_plans);
  arena->max_length = static_cast<size_t>(max_length);
  return self;
}

void arena_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  {
    std::lock_guard<std::mutex> guard(lock);
    arena_of(self)->close();
    arena_of(self)->release();
  }
  type->tp_free(self);
  Py_DECREF(type);
}

bool is_on(const Arena* arena) {
  std::lock_guard<std::mutex> guard(lock);
  return arena != nullptr && arena->is_on;
}

PyObject* arena_start(PyObject* self, PyObject*) {
  Arena* arena = arena_of(self);
  if (is_on(current)) {
    PyErr_SetString(PyExc_RuntimeError, "this thread already has an arena");
    return nullptr;
  }
  if (is_on(arena)) {
    PyErr_SetString(PyExc_RuntimeError, "another thread already has this arena");
    return nullptr;
  }
  holder.end();  // an arena whose Python object is gone
  {
    std::lock_guard<std::mutex> guard(lock);
    ++arena->num_references;
    arena->is_on = true;
  }
  current = holder.arena = arena;
  Py_RETURN_NONE;
}

PyObject* arena_stop(PyObject* self, PyObject*) {
  if (holder.arena == arena_of(self)) {
    holder.end();
  } else if (is_on(arena_of(self))) {
    PyErr_SetString(PyExc_RuntimeError, "this arena runs on another thread: stop it there, or let that thread end");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* arena_cut(PyObject* self, PyObject*) {
  int status = 0;
  {
    std::lock_guard<std::mutex> guard(lock);
    status = arena_of(self)->cut();
  }
  return PyLong_FromLong(status);
}

PyObject* as_bytes(const Sequence& values) {
  const auto size_bytes = static_cast<Py_ssize_t>(8 * values.size());
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()), size_bytes);
}

PyObject* arena_recording(PyObject* self, PyObject*) {
  Sequence sizes, ends;
  bool is_ready = false;
  {
    std::lock_guard<std::mutex> guard(lock);
    is_ready = arena_of(self)->take_ready();
    if (is_ready) {
      sizes = arena_of(self)->planning.sizes;
      ends = arena_of(self)->planning.ends;
    }
  }
  if (!is_ready) Py_RETURN_NONE;
  return Py_BuildValue("(NN)", as_bytes(sizes), as_bytes(ends));
}

bool take_plan(Arena* arena, Sequence offsets) {
  std::lock_guard<std::mutex> guard(lock);
  const Sequence& sizes = arena->planning.sizes;
  int64_t capacity_bytes = 0;
  bool is_right = sizes.size() == offsets.size() && !sizes.empty();
  for (size_t i = 0; is_right && i < sizes.size(); ++i) {
    if (offsets[i] == kOutlives) continue;
    is_right = offsets[i] >= 0 && offsets[i] % 64 == 0 && offsets[i] <= INT64_MAX / 2 - sizes[i];
    if (is_right) capacity_bytes = std::max(capacity_bytes, offsets[i] + sizes[i]);
  }
  if (is_right) arena->add_plan(std::move(offsets), static_cast<size_t>(capacity_bytes));
  return is_right;
}

PyObject* arena_plan(PyObject* self, PyObject* argument) {
  char* data = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(argument, &data, &length) < 0) return nullptr;
  const auto* first = reinterpret_cast<const int64_t*>(data);
  if (!take_plan(arena_of(self), Sequence(first, first + length / 8))) {
    PyErr_SetString(PyExc_ValueError, "these offsets do not fit the recording");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* arena_figures(PyObject* self, PyObject*) { return as_dict(copy_of(arena_of(self)->figures)); }

PyMethodDef arena_methods[] = {
    {"start", arena_start, METH_NOARGS, "Place the allocations of this thread from now on."},
    {"stop", arena_stop, METH_NOARGS, "Stop placing, forget all plans. Live blocks keep their places until freed."},
    {"cut", arena_cut, METH_NOARGS, "End a step. Return 2 if a recording is to be planned, 1 if after the next step."},
    {"recording", arena_recording, METH_NOARGS, "Return sizes and ends of a step to be planned, int64 bytes, or None."},
    {"plan", arena_plan, METH_O, "Set the offsets of the last recording, int64 bytes; -1 is outside."},
    {"figures", arena_figures, METH_NOARGS, "Return the figures of this arena."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot arena_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(arena_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(arena_dealloc)},
    {Py_tp_methods, arena_methods},
    {0, nullptr}};

PyType_Spec arena_spec = {"torchdelta_arena.Arena", sizeof(ArenaObject), 0, Py_TPFLAGS_DEFAULT, arena_slots};

PyMethodDef module_methods[] = {
    {"install", install, METH_NOARGS, "Install this allocator over the current one. Repeated calls do nothing."},
    {"install_before", install_before, METH_O, "Put it over the allocator in a capsule. Return a capsule with it."},
    {"is_allocator", is_allocator, METH_O, "Return whether it is the one in a capsule; None: the current one."},
    {"figures", total_figures, METH_NOARGS, "Return the figures of all arenas of this process."},
    {"mapped_bytes", mapped_bytes, METH_NOARGS, "Return the bytes that all arenas have mapped."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchdelta_arena", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_torchdelta_arena() {
  PyObject* self = PyModule_Create(&module);
  if (self == nullptr) return nullptr;
  PyObject* type = PyType_FromSpec(&arena_spec);
  if (type == nullptr || PyModule_AddObject(self, "Arena", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}
