// Watches the caching allocator of CUDA devices: how many bytes are in use, their peak, and when they pass a limit.
//
// Torch calls a tracker for every allocation and every free of its allocator, with the size that was asked for. Here
// this size is rounded up to 512 bytes, as torch does. What a block holds beyond that (a large one is not split if
// little would remain) is missing from the sum. So the sum is set to the allocator's own figure from time to time, and
// what was missing then is added to the peak since the time before.
//
// A tracker runs under the allocator's lock, and must not wait for Python's. So passing the limit calls back later, on
// the main thread, between two instructions of Python.
#include <Python.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace {

constexpr size_t kNumDevices = 64;
constexpr int64_t kRoundingBytes = 512;

struct Watched {
  std::atomic<int64_t> live{0};  // bytes in use
  std::atomic<int64_t> high{0};  // the most of these since they were last set
  std::atomic<int64_t> marked_high{0};  // the same since the last mark
  std::atomic<int64_t> limit{INT64_MAX};
  std::atomic<int64_t> passed{0};  // what was in use when the limit was passed
  int64_t peak{0};    // before they were last set, since it was last taken; under Python's lock, as what follows
  int64_t marked{0};  // bytes in use at the last mark
  PyObject* on_limit{nullptr};
};

// Never destroyed: memory is freed after static objects are destroyed.
std::array<Watched, kNumDevices>& devices = *new std::array<Watched, kNumDevices>;
bool is_attached = false;

int call_on_limit(void* pointer) {
  PyObject* function = static_cast<Watched*>(pointer)->on_limit;
  if (function == nullptr) return 0;
  Py_INCREF(function);
  PyObject* answer = PyObject_CallNoArgs(function);
  Py_DECREF(function);
  Py_XDECREF(answer);
  return answer != nullptr ? 0 : -1;
}

void pass_limit(Watched& device, int64_t limit, int64_t live) {
  // Only once. If too many calls are pending, the next allocation tries again, unless there is another limit by then.
  if (!device.limit.compare_exchange_strong(limit, INT64_MAX)) return;
  device.passed.store(live);
  int64_t none = INT64_MAX;
  if (Py_AddPendingCall(&call_on_limit, &device) != 0) device.limit.compare_exchange_strong(none, limit);
}

void raise(std::atomic<int64_t>& high, int64_t live) {
  int64_t before = high.load();
  while (live > before && !high.compare_exchange_weak(before, live)) {
  }
}

void note(Watched& device, int64_t live) {
  raise(device.high, live);
  raise(device.marked_high, live);
  const int64_t limit = device.limit.load();
  if (live > limit) pass_limit(device, limit, live);
}

void track(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  if (entry.action_ != Entry::ALLOC && entry.action_ != Entry::FREE_COMPLETED) return;
  const auto index = static_cast<size_t>(entry.device_);
  if (index >= kNumDevices) return;
  Watched& device = devices[index];
  const auto size = static_cast<int64_t>(entry.size_);
  const int64_t rounded = (size + kRoundingBytes - 1) / kRoundingBytes * kRoundingBytes;
  if (entry.action_ == Entry::ALLOC) {
    note(device, device.live.fetch_add(rounded) + rounded);
  } else {
    device.live.fetch_sub(rounded);
  }
}

Watched* watched(PyObject* argument) {
  const long index = PyLong_AsLong(argument);
  if (index == -1 && PyErr_Occurred()) return nullptr;
  if (index < 0 || index >= static_cast<long>(kNumDevices)) {
    PyErr_Format(PyExc_ValueError, "no device %ld can be watched: the last one is %zu", index, kNumDevices - 1);
    return nullptr;
  }
  return &devices[static_cast<size_t>(index)];
}

PyObject* attach(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  if (!is_attached) {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&track);
    is_attached = true;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* set_live(PyObject*, PyObject* arguments) {
  PyObject* index;
  long long reading, counted;
  if (!PyArg_ParseTuple(arguments, "OLL", &index, &reading, &counted)) return nullptr;
  Watched* device = watched(index);
  if (device == nullptr) return nullptr;
  const int64_t missed = reading - counted;
  const int64_t live = device->live.fetch_add(missed) + missed;
  device->peak = std::max(device->peak, device->high.exchange(live) + std::max<int64_t>(missed, 0));
  note(*device, live);
  Py_RETURN_NONE;
}

PyObject* live_bytes(PyObject*, PyObject* index) {
  Watched* device = watched(index);
  return device != nullptr ? PyLong_FromLongLong(device->live.load()) : nullptr;
}

PyObject* live_capsule(PyObject*, PyObject* index) {
  Watched* device = watched(index);
  return device != nullptr ? PyCapsule_New(&device->live, "torchdelta.live_bytes", nullptr) : nullptr;
}

PyObject* take_peak(PyObject*, PyObject* index) {
  Watched* device = watched(index);
  if (device == nullptr) return nullptr;
  const int64_t live = device->live.load();
  const int64_t peak = std::max(device->peak, device->high.exchange(live));
  device->peak = live;
  return PyLong_FromLongLong(peak);
}

PyObject* mark(PyObject*, PyObject* index) {
  Watched* device = watched(index);
  if (device == nullptr) return nullptr;
  device->marked = device->live.load();
  device->marked_high.store(device->marked);
  Py_RETURN_NONE;
}

PyObject* growth_bytes(PyObject*, PyObject* index) {
  Watched* device = watched(index);
  return device != nullptr ? PyLong_FromLongLong(device->marked_high.load() - device->marked) : nullptr;
}

PyObject* passed_bytes(PyObject*, PyObject* index) {
  Watched* device = watched(index);
  return device != nullptr ? PyLong_FromLongLong(device->passed.load()) : nullptr;
}

PyObject* set_limit(PyObject*, PyObject* arguments) {
  PyObject *index, *function;
  long long limit;
  if (!PyArg_ParseTuple(arguments, "OLO", &index, &limit, &function)) return nullptr;
  Watched* device = watched(index);
  if (device == nullptr) return nullptr;
  Py_XSETREF(device->on_limit, Py_NewRef(function));
  device->limit.store(limit);
  Py_RETURN_NONE;
}

PyObject* clear_limit(PyObject*, PyObject* index) {
  Watched* device = watched(index);
  if (device == nullptr) return nullptr;
  device->limit.store(INT64_MAX);
  Py_CLEAR(device->on_limit);
  Py_RETURN_NONE;
}

PyMethodDef module_methods[] = {
    {"attach", attach, METH_NOARGS, "Begin to watch all devices; CUDA must have been initialized. Repeated calls do nothing."},
    {"set_live", set_live, METH_VARARGS,
     "Correct the bytes in use: (device index, what the allocator says, what was counted just before it was asked)."},
    {"live_bytes", live_bytes, METH_O, "Return the bytes in use on a device."},
    {"live_capsule", live_capsule, METH_O, "Return where they are, for other native modules."},
    {"take_peak", take_peak, METH_O, "Return their peak since the last call."},
    {"mark", mark, METH_O, "Start to measure growth."},
    {"growth_bytes", growth_bytes, METH_O, "Return the largest growth since the mark."},
    {"set_limit", set_limit, METH_VARARGS,
     "Call a function (device index, limit, function) once when an allocation, or `set_live`, passes a limit: on the main "
     "thread, soon after."},
    {"passed_bytes", passed_bytes, METH_O, "Return the bytes in use when the latest limit was passed."},
    {"clear_limit", clear_limit, METH_O, "Remove the limit."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchdelta_device_watch", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_torchdelta_device_watch() { return PyModule_Create(&module); }
