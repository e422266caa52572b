// The tape of steps whose program is known: records the ops that it replays, drops what they make, and replays them, all
// without Python. It does for such steps what runtime/record, runtime/memory and runtime/state do in Python for all
// others, and only what is common: plain tensors on one device, and ops that make new tensors or write their first argument.
//
// gate.cpp gives it the ops of a forward, and tells it of each op that writes an argument before that runs. saved_hooks.cpp
// gives it the saved tensors. A *lane* says what leaves and returns at which saved tensor (runtime/follow/lane.py).
// Whatever happens that is not in the lane, Python takes over: `describe` tells it all that was recorded and is still
// needed, as if Python had recorded it (runtime/record/handover.py).
#include <Python.h>
#include <pthread.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <utility>
#include <vector>

#include "errors.h"
#include "lists.h"
#include "tape.h"
#include "tape_chain.h"
#include "tape_content.h"
#include "tape_describe.h"
#include "tape_recording.h"

namespace {

using namespace tape;

struct PyTape {
  PyObject_HEAD
  NativeTape* tape;
  PyObject* make_room;
  PyObject* raise_changed;
  PyObject* hand_over;
};

PyTape* tape_of(PyObject* self) { return reinterpret_cast<PyTape*>(self); }

PyObject* tape_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *device, *live, *make_room, *raise_changed, *hand_over;
  if (!PyArg_ParseTuple(arguments, "O!OOOO", &THPDeviceType, &device, &live, &make_room, &raise_changed, &hand_over)) {
    return nullptr;
  }
  auto* count = static_cast<const std::atomic<int64_t>*>(PyCapsule_GetPointer(live, "torchdelta.live_bytes"));
  if (count == nullptr) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  const c10::Device where = reinterpret_cast<THPDevice*>(device)->device;
  tape_of(self)->make_room = Py_NewRef(make_room);
  tape_of(self)->raise_changed = Py_NewRef(raise_changed);
  tape_of(self)->hand_over = Py_NewRef(hand_over);
  tape_of(self)->tape = new NativeTape(where.is_cpu() ? c10::Device(c10::kCPU) : where, count, make_room, raise_changed,
                                       hand_over);
  return self;
}

int tape_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(tape_of(self)->make_room);
  Py_VISIT(tape_of(self)->raise_changed);
  Py_VISIT(tape_of(self)->hand_over);
  return 0;
}

void tape_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  delete tape_of(self)->tape;
  Py_CLEAR(tape_of(self)->make_room);
  Py_CLEAR(tape_of(self)->raise_changed);
  Py_CLEAR(tape_of(self)->hand_over);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Read {number: [numbers]} and {number: [[numbers]]}.
bool read_lane(PyObject* drops, PyObject* replays, Lane* lane) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(drops, &position, &key, &value)) {
    lane->drops[PyLong_AsLongLong(key)] = lists::from_python<int64_t>(value);
  }
  position = 0;
  while (PyDict_Next(replays, &position, &key, &value)) {
    auto& groups = lane->replays[PyLong_AsLongLong(key)];
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(value); ++index) {
      groups.push_back(lists::from_python<int64_t>(PyList_GET_ITEM(value, index)));
    }
  }
  return PyErr_Occurred() == nullptr;
}

PyObject* tape_begin(PyObject* self, PyObject* arguments) {
  PyObject *drops, *replays;
  long long most_bytes;
  if (!PyArg_ParseTuple(arguments, "O!O!L", &PyDict_Type, &drops, &PyDict_Type, &replays, &most_bytes)) return nullptr;
  return with_errors([self, drops, replays, most_bytes]() -> PyObject* {
    Lane lane;
    if (!read_lane(drops, replays, &lane)) return nullptr;
    tape_of(self)->tape->begin(std::move(lane), most_bytes);
    Py_RETURN_NONE;
  });
}

PyObject* tape_end_forward(PyObject* self, PyObject*) {
  tape_of(self)->tape->end_forward();
  Py_RETURN_NONE;
}

PyObject* tape_before_write(PyObject* self, PyObject* tensor) {
  if (!THPVariable_Check(tensor)) Py_RETURN_NONE;
  return with_errors([self, tensor] {
    tape_of(self)->tape->before_write_of(THPVariable_Unpack(tensor));
    return Py_NewRef(Py_None);
  });
}

PyObject* tape_clear(PyObject* self, PyObject*) {
  tape_of(self)->tape->clear();
  Py_RETURN_NONE;
}

PyObject* tape_take_counts(PyObject* self, PyObject*) { return tape_of(self)->tape->take_counts(); }

PyObject* tape_act(PyObject* self, PyObject* arguments) {
  long long number;
  int is_unpack;
  if (!PyArg_ParseTuple(arguments, "Lp", &number, &is_unpack)) return nullptr;
  return with_errors([self, number, is_unpack] {
    if (is_unpack) {
      tape_of(self)->tape->replay_at(number);
    } else {
      tape_of(self)->tape->drop_at(number);
    }
    return Py_NewRef(Py_None);
  });
}

PyObject* tape_describe_saves(PyObject*, PyObject* arguments) {
  PyObject *capsules, *builder;
  if (!PyArg_ParseTuple(arguments, "O!O", &PyList_Type, &capsules, &builder)) return nullptr;
  std::vector<SavePtr> saves;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(capsules); ++index) {
    auto* save = static_cast<Save*>(PyCapsule_GetPointer(PyList_GET_ITEM(capsules, index), kSaveCapsule));
    if (save == nullptr) return nullptr;
    saves.push_back(SavePtr::reclaim_copy(save));
  }
  return with_errors([&saves, builder] { return describe(saves, builder); });
}

PyObject* tape_capsule(PyObject* self, PyObject*) {
  return PyCapsule_New(static_cast<Tape*>(tape_of(self)->tape), kCapsule, nullptr);
}

PyMethodDef tape_methods[] = {
    {"begin", tape_begin, METH_VARARGS, "Begin the forward of a step: (drops, replays, most_bytes)."},
    {"end_forward", tape_end_forward, METH_NOARGS, "Record no op from now on."},
    {"before_write", tape_before_write, METH_O,
     "Keep the content of a tensor that is about to be written, for the replays and saved tensors that need it."},
    {"clear", tape_clear, METH_NOARGS, "Forget the step. What handles need stays."},
    {"act", tape_act, METH_VARARGS, "Do what is due at a saved tensor that Python packs, or unpacks."},
    {"describe", tape_describe_saves, METH_VARARGS, "Describe what saved tensors need to a builder."},
    {"take_counts", tape_take_counts, METH_NOARGS,
     "Return (replayed ops, bytes, saved tensors, dropped, bytes, seconds of replays) since the last call."},
    {"capsule", tape_capsule, METH_NOARGS, "Return the tape for the gate and the hooks. It must outlive them."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot tape_slots[] = {{Py_tp_new, reinterpret_cast<void*>(tape_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(tape_dealloc)},
                            {Py_tp_traverse, reinterpret_cast<void*>(tape_traverse)},
                            {Py_tp_methods, tape_methods},
                            {0, nullptr}};

PyType_Spec tape_spec = {"torchdelta_tape.Tape", sizeof(PyTape), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tape_slots};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchdelta_tape", nullptr, -1, nullptr};

void take_lock() { storage_mutex().lock(); }
void give_lock() { storage_mutex().unlock(); }

}  // namespace

PyMODINIT_FUNC PyInit_torchdelta_tape() {
  // A child that is forked while another thread has the mutex would wait for it forever.
  static const int failed = pthread_atfork(take_lock, give_lock, give_lock);
  if (failed != 0) return PyErr_NoMemory();
  PyObject* self = PyModule_Create(&module);
  if (self == nullptr) return nullptr;
  PyObject* type = PyType_FromSpec(&tape_spec);
  if (type == nullptr || PyModule_AddObject(self, "Tape", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}
