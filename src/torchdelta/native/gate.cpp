// The gate: sees the ops of a followed step in C++, and lets only those be recorded that its program replays.
// It is a fallback on the dispatch key `Fake`, which lies below autograd and the Python key and has no kernels in stock
// torch. The key is switched on for one thread, outside of backwards. A recorded step teaches the gate a *sequence*: for
// each op a hash of its identity and of the shapes, dtypes and integers of its arguments, what it needed, and whether it
// has to be recorded. In later steps each op is compared with the sequence. An op that has to be recorded goes to the
// recorder, which is a dispatch mode in Python, or to the tape (tape.cpp); all others go to their kernels at once. If an
// op differs, or might pass the budget, Python is asked before it runs (runtime/record/partial.py).
//
// Two steps with the same sequence may still write different tensors (`slots[step % 2].copy_(x)`). So an op is also
// recorded if it writes a storage that the recorder knows: a replay might read it, or an op might be known to have made
// its content. The gate notes the storages of what recorded ops read and return; `forget` clears that.
//
// On an accelerator, an op on another stream than the one that was current when `follow` was called counts as one that
// differs. If an op finds no memory there, the recorder runs it again, which makes room.
#include <Python.h>
#include <torch/csrc/Device.h>

#include "errors.h"
#include "gate.h"
#include "lists.h"

namespace {

c10::RegistrationHandleRAII& registration() {
  static auto& handle = *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
      kKey, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "torchdelta"));
  return handle;
}

PyObject* install(PyObject*, PyObject*) {
  static bool is_installed = false;
  if (!is_installed && c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey)) Py_RETURN_FALSE;
  registration();
  is_installed = true;
  Py_RETURN_TRUE;
}

// -- sequences

PyObject* sequence_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *hashes, *needs, *recorded;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyList_Type, &hashes, &PyList_Type, &needs, &PyList_Type, &recorded)) {
    return nullptr;
  }
  if (PyList_GET_SIZE(needs) != PyList_GET_SIZE(hashes) || PyList_GET_SIZE(recorded) != PyList_GET_SIZE(hashes)) {
    PyErr_SetString(PyExc_ValueError, "a sequence takes three lists of the same length");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  const auto all_hashes = lists::from_python<uint64_t>(hashes);
  const auto all_needs = lists::from_python<int64_t>(needs);
  const auto all_recorded = lists::from_python<int64_t>(recorded);
  auto* ops = reinterpret_cast<Sequence*>(self)->ops = new std::vector<Op>;
  ops->reserve(all_hashes.size());
  for (size_t index = 0; index < all_hashes.size(); ++index) {
    ops->push_back(Op{all_hashes[index], all_needs[index], all_recorded[index]});
  }
  if (PyErr_Occurred()) Py_CLEAR(self);
  return self;
}

void sequence_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Sequence*>(self)->ops;
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot sequence_slots[] = {{Py_tp_new, reinterpret_cast<void*>(sequence_new)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(sequence_dealloc)},
                                {0, nullptr}};

PyType_Spec sequence_spec = {"torchdelta_gate.Sequence", sizeof(Sequence), 0, Py_TPFLAGS_DEFAULT, sequence_slots};

// -- gates

PyObject* gate_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *mode, *device, *counter, *live, *on_other, *make_room, *on_unseen;
  if (!PyArg_ParseTuple(arguments, "OO!OOOOO", &mode, &THPDeviceType, &device, &counter, &live, &on_other, &make_room,
                        &on_unseen)) {
    return nullptr;
  }
  auto* count = static_cast<const std::atomic<int64_t>*>(PyCapsule_GetPointer(live, "torchdelta.live_bytes"));
  if (count == nullptr) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Gate* gate = gate_of(self);
  gate->mode = mode;
  gate->counter = Py_NewRef(counter);
  gate->on_other = Py_NewRef(on_other);
  gate->make_room = Py_NewRef(make_room);
  gate->on_unseen = Py_NewRef(on_unseen);
  gate->live = count;
  gate->shared_mode = new std::shared_ptr<Mode>(std::make_shared<Mode>(Py_NewRef(mode), getPyInterpreter()));
  gate->learned = new std::vector<uint64_t>;
  gate->known = new KnownStorages;
  gate->stream = new HomeStream(reinterpret_cast<THPDevice*>(device)->device);
  gate->is_on_cpu = reinterpret_cast<THPDevice*>(device)->device.is_cpu();
  return self;
}

int gate_traverse(PyObject* self, visitproc visit, void* arg) {
  Gate* gate = gate_of(self);
  Py_VISIT(Py_TYPE(self));
  if (gate->shared_mode != nullptr && gate->shared_mode->use_count() == 1) Py_VISIT(gate->mode);
  Py_VISIT(gate->counter);
  Py_VISIT(gate->on_other);
  Py_VISIT(gate->make_room);
  Py_VISIT(gate->on_unseen);
  Py_VISIT(gate->tape_owner);
  return 0;
}

void turn(Gate* gate, State state) {
  gate->state = state;
  const bool is_on = state != State::kOff;
  if (is_on) {
    current = gate;
  } else if (current == gate) {
    current = nullptr;
  } else {
    return;  // it is that of another thread, or was turned off before
  }
  c10::impl::tls_set_dispatch_key_included(kKey, is_on);
  set_snapshot();
}

int gate_clear(PyObject* self) {
  Gate* gate = gate_of(self);
  turn(gate, State::kOff);
  gate->mode = nullptr;
  if (gate->shared_mode != nullptr) gate->shared_mode->reset();
  Py_CLEAR(gate->counter);
  Py_CLEAR(gate->on_other);
  Py_CLEAR(gate->make_room);
  Py_CLEAR(gate->on_unseen);
  Py_CLEAR(gate->sequence);
  gate->tape = nullptr;
  Py_CLEAR(gate->tape_owner);
  return 0;
}

void gate_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  gate_clear(self);
  delete gate_of(self)->shared_mode;
  delete gate_of(self)->learned;
  delete gate_of(self)->known;
  delete gate_of(self)->stream;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* gate_record(PyObject* self, PyObject*) {
  turn(gate_of(self), State::kRecording);
  Py_RETURN_NONE;
}

PyObject* gate_learn(PyObject* self, PyObject*) {
  Gate* gate = gate_of(self);
  gate->learned->clear();
  gate->position = 0;
  turn(gate, State::kLearning);
  Py_RETURN_NONE;
}

PyObject* gate_follow(PyObject* self, PyObject* arguments) {
  PyObject* sequence;
  long long most_bytes;
  if (!PyArg_ParseTuple(arguments, "O!L", sequence_type, &sequence, &most_bytes)) return nullptr;
  Gate* gate = gate_of(self);
  Py_XSETREF(gate->sequence, reinterpret_cast<Sequence*>(Py_NewRef(sequence)));
  gate->most_bytes = most_bytes;
  gate->position = 0;
  return with_errors([gate] {
    gate->stream->begin();
    turn(gate, State::kFollowing);
    return Py_NewRef(Py_None);
  });
}

PyObject* gate_end(PyObject* self, PyObject*) {
  turn(gate_of(self), State::kEnded);
  Py_RETURN_NONE;
}

PyObject* gate_close(PyObject* self, PyObject*) {
  turn(gate_of(self), State::kOff);
  Py_RETURN_NONE;
}

PyObject* gate_know(PyObject* self, PyObject* argument) {
  if (THPVariable_Check(argument)) {
    for_each_storage(c10::IValue(THPVariable_Unpack(argument)),
                     [self](const c10::Storage& storage) { gate_of(self)->known->add(storage); });
  }
  Py_RETURN_NONE;
}

PyObject* gate_use_tape(PyObject* self, PyObject* arguments) {
  PyObject *owner, *capsule;
  if (!PyArg_ParseTuple(arguments, "OO", &owner, &capsule)) return nullptr;
  Gate* gate = gate_of(self);
  gate->tape = nullptr;
  if (capsule != Py_None) {
    gate->tape = static_cast<tape::Tape*>(PyCapsule_GetPointer(capsule, tape::kCapsule));
    if (gate->tape == nullptr) return nullptr;
    Py_XSETREF(gate->tape_owner, Py_NewRef(owner));
  }
  Py_RETURN_NONE;
}

PyObject* gate_forget(PyObject* self, PyObject*) {
  gate_of(self)->known->clear();
  Py_RETURN_NONE;
}

PyObject* gate_is_complete(PyObject* self, PyObject*) {
  const Gate* gate = gate_of(self);
  return PyBool_FromLong(gate->state == State::kFollowing && gate->position == gate->sequence->ops->size());
}

PyObject* gate_learned(PyObject* self, PyObject*) { return lists::to_python(*gate_of(self)->learned); }

PyObject* gate_position(PyObject* self, void*) { return PyLong_FromSize_t(gate_of(self)->position); }

PyGetSetDef gate_attributes[] = {
    {"position", gate_position, nullptr, "How many ops of the sequence there were so far, the running one included.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef gate_methods[] = {
    {"record", gate_record, METH_NOARGS, "Record every op of this thread."},
    {"learn", gate_learn, METH_NOARGS, "Record every op from here on, and learn the sequence."},
    {"follow", gate_follow, METH_VARARGS, "Compare the ops from here on with a sequence, within so many bytes."},
    {"end", gate_end, METH_NOARGS, "The recorder is on the stack again: record what was dispatched before."},
    {"close", gate_close, METH_NOARGS, "See no op from now on."},
    {"know", gate_know, METH_O, "Record every later op that writes the storage of a tensor."},
    {"forget", gate_forget, METH_NOARGS, "Forget which storages the recorder has seen."},
    {"use_tape", gate_use_tape, METH_VARARGS, "Record on a tape from here on: (owner, capsule); (None, None): on none."},
    {"is_complete", gate_is_complete, METH_NOARGS, "Return whether the sequence was followed to its end."},
    {"learned", gate_learned, METH_NOARGS, "Return the hashes of the ops since `learn`."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot gate_slots[] = {{Py_tp_new, reinterpret_cast<void*>(gate_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(gate_dealloc)},
                            {Py_tp_traverse, reinterpret_cast<void*>(gate_traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(gate_clear)},
                            {Py_tp_getset, gate_attributes},
                            {Py_tp_methods, gate_methods},
                            {0, nullptr}};

PyType_Spec gate_spec = {"torchdelta_gate.Gate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, gate_slots};

PyMethodDef module_methods[] = {
    {"install", install, METH_NOARGS,
     "Register the fallback. Repeated calls do nothing. Return False if there is another one."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchdelta_gate", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_torchdelta_gate() {
  PyObject* self = PyModule_Create(&module);
  if (self == nullptr) return nullptr;
  PyObject* gate_type = PyType_FromSpec(&gate_spec);
  sequence_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&sequence_spec));
  if (gate_type == nullptr || sequence_type == nullptr || PyModule_AddObject(self, "Gate", gate_type) < 0 ||
      PyModule_AddObject(self, "Sequence", Py_NewRef(reinterpret_cast<PyObject*>(sequence_type))) < 0) {
    Py_XDECREF(gate_type);
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}
