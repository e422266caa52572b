// A CPU allocator that counts: it forwards to the previous one, and records which thread allocated how many bytes.
//
// Each counter belongs to the thread that starts it. It counts the allocations of that thread until they are freed, on
// any thread. All other allocations are not counted. The previous allocator allocates, so profiler events, huge pages
// and statistics do not change.
//
// It keeps c10's contract for `raw_allocate`: the context equals the data pointer, and there is one fixed deleter. A
// deleter gets the pointer only, hence the table. Pointers that are not in the table are not counted; those from before
// the installation have a DataPtr with the previous allocator's deleter.
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "file_mapping.h"
#include "weak_storage.h"

namespace {

struct Counter {
  std::atomic<int64_t> live{0};     // allocated by the thread and not yet freed, plus what `add` has added
  int64_t peak{0};                  // of live, since `take_peak_bytes`
  int64_t marked{0}, mark_peak{0};  // live at the last mark, and its peak since then
  int64_t limit{INT64_MAX};         // of live; passing it calls `on_limit` once, on the main thread
  int64_t most{INT64_MAX};          // of live; an allocation that would pass it is refused
  PyObject* on_limit{nullptr};
  std::atomic<int64_t> num_references{1};  // the Python object, and every allocation in the table
  void raise(int64_t now) {  // only on the counter's own thread
    if (now > peak) peak = now;
    if (now > mark_peak) mark_peak = now;
    if (now > limit) pass_limit();
  }
  void pass_limit();
  void release() {
    if (num_references.fetch_sub(1) == 1) delete this;
  }
};

// Runs on the main thread between two instructions of Python, with the interpreter's lock. These may be those of a
// destructor that runs inside an op: see [Note: moments between ops] in runtime/record/between_ops.py.
int call_on_limit(void* pointer) {
  auto* counter = static_cast<Counter*>(pointer);
  PyObject* function = counter->on_limit;
  int status = 0;
  if (function != nullptr) {
    Py_INCREF(function);
    PyObject* answer = PyObject_CallNoArgs(function);
    Py_DECREF(function);
    if (answer == nullptr) status = -1;
    Py_XDECREF(answer);
  }
  counter->release();
  return status;
}

void Counter::pass_limit() {
  num_references.fetch_add(1);
  if (Py_AddPendingCall(&call_on_limit, this) == 0) {
    limit = INT64_MAX;
  } else {
    num_references.fetch_sub(1);  // too many calls are pending: the next allocation tries again
  }
}

struct Entry {
  int64_t size_bytes;
  Counter* counter;
};

struct alignas(64) Shard {
  std::mutex lock;
  std::unordered_map<void*, Entry> entries;
};

constexpr size_t kNumShards = 64;
// Never destroyed: storages die after static objects do.
std::array<Shard, kNumShards>& shards = *new std::array<Shard, kNumShards>;
std::atomic<int64_t> num_entries{0};
thread_local Counter* current = nullptr;
// The arena (arena.cpp) may be inserted below later: it also frees what the allocator below it has allocated.
std::atomic<c10::Allocator*> previous{nullptr};
std::atomic<c10::DeleterFnPtr> previous_deleter{nullptr};

Shard& shard_of(void* pointer) {
  return shards[(reinterpret_cast<uintptr_t>(pointer) >> 6) * 0x9E3779B97F4A7C15ull >> 58];
}

void count_and_delete(void* pointer) {
  if (pointer == nullptr) return;
  if (num_entries.load(std::memory_order_acquire) > 0) {
    Counter* counter = nullptr;
    {
      Shard& shard = shard_of(pointer);
      std::lock_guard<std::mutex> guard(shard.lock);
      auto found = shard.entries.find(pointer);
      if (found != shard.entries.end()) {
        counter = found->second.counter;
        counter->live.fetch_sub(found->second.size_bytes);
        shard.entries.erase(found);
      }
    }
    if (counter != nullptr) {
      num_entries.fetch_sub(1);
      counter->release();
    }
  }
  previous_deleter.load(std::memory_order_acquire)(pointer);
}

bool is_refused(size_t size_bytes) {
  return current != nullptr && current->live.load() + static_cast<int64_t>(size_bytes) > current->most;
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    // No Python here, not even to collect garbage: a kernel is running, and may hold one of torch's locks.
    if (is_refused(size_bytes)) {
      current->pass_limit();
      const std::string message = "DefaultCPUAllocator: can't allocate memory within this budget: " +
                                  std::to_string(size_bytes) +
                                  " bytes out of memory. Recording resumes: try the step again.";
      TORCH_CHECK_WITH(OutOfMemoryError, false, message);
    }
    void* pointer = previous.load(std::memory_order_acquire)->raw_allocate(size_bytes);
    Counter* counter = current;
    if (counter != nullptr && pointer != nullptr) {
      const auto size = static_cast<int64_t>(size_bytes);
      counter->num_references.fetch_add(1);
      {
        Shard& shard = shard_of(pointer);
        std::lock_guard<std::mutex> guard(shard.lock);
        shard.entries[pointer] = {size, counter};
      }
      num_entries.fetch_add(1);
      counter->raise(counter->live.fetch_add(size) + size);
    }
    return {pointer, pointer, &count_and_delete, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &count_and_delete; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    default_copy_data(target, source, size_bytes);
  }
};

CountingAllocator& counting = *new CountingAllocator;

// A child of fork() has one thread only: no other thread may hold a lock during the fork.
void lock_all() {
  for (Shard& shard : shards) shard.lock.lock();
}
void unlock_all() {
  for (Shard& shard : shards) shard.lock.unlock();
}
void forget_in_child() {
  unlock_all();
  current = nullptr;  // the child has no budget
}

PyObject* install(PyObject*, PyObject*) {
  if (previous.load() == nullptr) {
    c10::Allocator* found = c10::GetCPUAllocator();
    if (found->raw_deleter() == nullptr) {
      PyErr_SetString(PyExc_RuntimeError, "the current CPU allocator has no raw deleter");
      return nullptr;
    }
    previous_deleter.store(found->raw_deleter());
    previous.store(found);
    pthread_atfork(lock_all, unlock_all, forget_in_child);
    c10::SetCPUAllocator(&counting);
  }
  return PyBool_FromLong(c10::GetCPUAllocator() == &counting);
}

PyObject* is_installed(PyObject*, PyObject*) { return PyBool_FromLong(c10::GetCPUAllocator() == &counting); }

constexpr const char* kAllocator = "c10::Allocator";

PyObject* get_previous(PyObject*, PyObject*) {
  c10::Allocator* found = previous.load();
  if (found == nullptr) Py_RETURN_NONE;
  return PyCapsule_New(found, kAllocator, nullptr);
}

PyObject* set_previous(PyObject*, PyObject* capsule) {
  auto* allocator = static_cast<c10::Allocator*>(PyCapsule_GetPointer(capsule, kAllocator));
  if (allocator == nullptr) return nullptr;
  previous_deleter.store(allocator->raw_deleter(), std::memory_order_release);  // first: it has allocated nothing yet
  previous.store(allocator, std::memory_order_release);
  Py_RETURN_NONE;
}

struct CounterObject {
  PyObject_HEAD
  Counter* counter;
};

Counter* counter_of(PyObject* self) { return reinterpret_cast<CounterObject*>(self)->counter; }

PyObject* counter_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) reinterpret_cast<CounterObject*>(self)->counter = new Counter;
  return self;
}

void counter_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  if (current == counter_of(self)) current = nullptr;
  Py_CLEAR(counter_of(self)->on_limit);
  counter_of(self)->release();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* counter_start(PyObject* self, PyObject*) {
  current = counter_of(self);
  Py_INCREF(self);  // the thread keeps it alive until `stop`
  Py_RETURN_NONE;
}

PyObject* counter_stop(PyObject* self, PyObject*) {
  counter_of(self)->limit = counter_of(self)->most = INT64_MAX;
  Py_CLEAR(counter_of(self)->on_limit);
  if (current == counter_of(self)) {
    current = nullptr;
    Py_DECREF(self);
  }
  Py_RETURN_NONE;
}

PyObject* counter_add(PyObject* self, PyObject* argument) {
  const long long size_bytes = PyLong_AsLongLong(argument);
  if (size_bytes == -1 && PyErr_Occurred()) return nullptr;
  Counter* counter = counter_of(self);
  counter->raise(counter->live.fetch_add(size_bytes) + size_bytes);
  Py_RETURN_NONE;
}

PyObject* counter_live(PyObject* self, PyObject*) { return PyLong_FromLongLong(counter_of(self)->live.load()); }

PyObject* counter_live_capsule(PyObject* self, PyObject*) {
  return PyCapsule_New(&counter_of(self)->live, "torchdelta.live_bytes", nullptr);
}

PyObject* counter_mark(PyObject* self, PyObject*) {
  Counter* counter = counter_of(self);
  counter->marked = counter->mark_peak = counter->live.load();
  return PyLong_FromLongLong(counter->marked);
}

PyObject* counter_growth(PyObject* self, PyObject*) {
  return PyLong_FromLongLong(counter_of(self)->mark_peak - counter_of(self)->marked);
}

PyObject* counter_take_peak(PyObject* self, PyObject*) {
  Counter* counter = counter_of(self);
  const int64_t peak = counter->peak;
  counter->peak = counter->live.load();
  return PyLong_FromLongLong(peak);
}

PyObject* counter_set_limit(PyObject* self, PyObject* arguments) {
  long long limit_bytes, most_bytes;
  PyObject* function;
  if (!PyArg_ParseTuple(arguments, "LLO", &limit_bytes, &most_bytes, &function)) return nullptr;
  Counter* counter = counter_of(self);
  counter->limit = limit_bytes;
  counter->most = most_bytes;
  Py_XSETREF(counter->on_limit, Py_NewRef(function));
  Py_RETURN_NONE;
}

PyObject* counter_clear_limit(PyObject* self, PyObject*) {
  counter_of(self)->limit = counter_of(self)->most = INT64_MAX;
  Py_CLEAR(counter_of(self)->on_limit);
  Py_RETURN_NONE;
}

PyObject* counter_owns(PyObject* self, PyObject* argument) {
  void* pointer = PyLong_AsVoidPtr(argument);
  if (pointer == nullptr && PyErr_Occurred()) return nullptr;
  Shard& shard = shard_of(pointer);
  std::lock_guard<std::mutex> guard(shard.lock);
  auto found = shard.entries.find(pointer);
  return PyBool_FromLong(found != shard.entries.end() && found->second.counter == counter_of(self));
}

PyMethodDef counter_methods[] = {
    {"start", counter_start, METH_NOARGS, "Count the allocations of this thread from now on."},
    {"stop", counter_stop, METH_NOARGS, "Stop counting allocations; later frees are still subtracted."},
    {"add", counter_add, METH_O, "Add bytes that were allocated elsewhere; a negative number subtracts."},
    {"live_bytes", counter_live, METH_NOARGS, "Return the live bytes."},
    {"live_capsule", counter_live_capsule, METH_NOARGS,
     "Return a capsule with the address of the live bytes, valid as long as this object lives."},
    {"mark", counter_mark, METH_NOARGS, "Start to measure growth. Return the live bytes."},
    {"growth_bytes", counter_growth, METH_NOARGS, "Return the largest growth since the mark."},
    {"take_peak_bytes", counter_take_peak, METH_NOARGS, "Return the peak since the last call."},
    {"set_limit", counter_set_limit, METH_VARARGS,
     "Call a function (limit, most, function) once when the live bytes pass a limit: on the main thread, soon after. "
     "Refuse allocations that would pass the most."},
    {"clear_limit", counter_clear_limit, METH_NOARGS, "Call none, and refuse none."},
    {"owns", counter_owns, METH_O, "Return whether this counter counts the allocation at this address."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot counter_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(counter_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(counter_dealloc)},
    {Py_tp_methods, counter_methods},
    {0, nullptr}};

PyType_Spec counter_spec = {"torchdelta_counting.Counter", sizeof(CounterObject), 0, Py_TPFLAGS_DEFAULT, counter_slots};

PyMethodDef module_methods[] = {
    {"install", install, METH_NOARGS, "Install this allocator over the current one. Repeated calls do nothing."},
    {"is_installed", is_installed, METH_NOARGS, "Return whether it is the current allocator."},
    {"previous", get_previous, METH_NOARGS, "Return a capsule with the allocator below, None before the installation."},
    {"set_previous", set_previous, METH_O, "Insert an allocator below, which forwards to the present one."},
    {"map_pieces", file_mapping::map_pieces, METH_VARARGS,
     "Give an empty storage pieces of a file as its memory (address, size, descriptor, pieces, keeper). The keeper lives "
     "as long as that memory."},
    {"free_pieces", file_mapping::free_pieces, METH_VARARGS,
     "Free the disk space of pieces of a file (descriptor, pieces), if its file system can."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchdelta_counting", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_torchdelta_counting() {
  PyObject* self = PyModule_Create(&module);
  if (self == nullptr) return nullptr;
  PyObject* type = PyType_FromSpec(&counter_spec);
  if (type == nullptr || PyModule_AddObject(self, "Counter", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(self);
    return nullptr;
  }
  PyObject* weak_type = PyType_FromSpec(&weak_storage::spec);
  if (weak_type == nullptr || PyModule_AddObject(self, "WeakStorage", weak_type) < 0) {
    Py_XDECREF(weak_type);
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}
