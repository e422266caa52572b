// The objects of saved_hooks.cpp: the hooks of a session, the handles that autograd holds, and lists of saved tensors.
#pragma once
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "lists.h"
#include "tape.h"

namespace {

struct Hooks;

struct Handle {
  PyObject_HEAD
  at::Tensor tensor;  // undefined once it was adopted
  uint32_t version;   // of the tensor when it was saved
  tape::SavePtr save;   // on the tape; null for most
  bool is_due;          // whether Python has something to do when it is unpacked
  PyObject* packed;   // what the Python hook made of it, or null
  Hooks* hooks;
  Handle* previous;  // the living handles of `hooks`, newest first
  Handle* next;
};

// What is to be done on the tape with a saved tensor that has a number: a sum of these. 0: Python packs it.
enum OnTape : int64_t { kDropped = 1, kKept = 2, kSavedInPython = 4, kUnpackedInPython = 8 };

// The tensors that a step saves from some moment on, in order.
struct Saves {
  PyObject_HEAD
  std::vector<int64_t>* sizes;    // in bytes
  std::vector<int64_t>* numbers;  // negative: Python need not pack it
  std::vector<int64_t>* lanes;
};

struct Hooks {
  PyObject_HEAD
  PyObject* pack;  // the Python hooks
  PyObject* unpack;
  PyObject* pack_odd;     // packs what is not a plain tensor, in an unrecorded step
  PyObject* on_modified;  // (tensor, expected version): raises eager's error
  PyObject* on_larger;    // called when a step saves more than the last recorded one
  PyObject* keep_apart;   // (tensor): it is unpacked for a custom Function, and others hold its storage
  std::vector<int64_t>* sizes;     // in bytes, of the tensors that this step has saved so far, if it is recorded
  std::vector<int64_t>* expected;  // of those of the last recorded step
  bool has_expected;               // whether there is one, recorded as a whole
  bool is_partial;                 // whether recording resumed in the middle of this step
  bool is_packing;                 // whether the Python hook is packing a tensor, whose size is the last of `sizes`
  size_t num_saved;                // by this step, if it is not recorded
  bool is_paused;
  Handle* newest;
  bool is_compared;  // whether the tensors that this step saves are compared with `saves`
  Saves* saves;
  PyObject* on_other;       // (index): the step saves another tensor
  PyObject* pack_numbered;  // (tensor, number)
  PyObject* tape_owner;
  tape::Tape* tape;         // null before there was one
  bool is_on_tape;          // whether this step uses it
  PyObject* adopt_dropped;  // (saves): returns what the Python hook would have made of them
  PyObject* act;            // (number, whether it is an unpack): does what Python does there
  PyObject* on_empty;       // called once, when no handle lives any more; null for none
};

PyTypeObject* handle_type = nullptr;
PyTypeObject* saves_type = nullptr;
constexpr size_t kMostSizes = size_t{1} << 20;  // a program that saves and saves without a step does not fill the memory

Handle* handle_of(PyObject* self) { return reinterpret_cast<Handle*>(self); }
Hooks* hooks_of(PyObject* self) { return reinterpret_cast<Hooks*>(self); }

// -- handles

void unlink(Handle* handle) {
  if (handle->previous != nullptr) handle->previous->next = handle->next;
  if (handle->next != nullptr) handle->next->previous = handle->previous;
  if (handle->hooks->newest == handle) handle->hooks->newest = handle->next;
  handle->previous = handle->next = nullptr;
}

bool is_of_leaf(const at::Tensor& tensor) {
  if (tensor.is_leaf()) return true;
  if (!tensor.is_view()) return false;
  const at::TensorBase& base = tensor._base();
  return base.is_leaf() && base.requires_grad();
}

PyObject* new_handle(Hooks* hooks, const at::Tensor& tensor, tape::SavePtr save = tape::SavePtr()) {
  Handle* handle = PyObject_GC_New(Handle, handle_type);
  if (handle == nullptr) return nullptr;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  // A node that saves its own output must not hold the output's graph: that would be a cycle. A leaf has no graph, and
  // is held itself, so that exchanging it raises as in eager mode. So is a view of a trained leaf: Python has to know
  // that its storage is the leaf's.
  const bool is_dropped = save && save->has_content();
  new (&handle->save) tape::SavePtr(std::move(save));
  handle->is_due = false;
  new (&handle->tensor) at::Tensor(
      is_dropped ? at::Tensor() : is_of_leaf(tensor) ? tensor : at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false)));
  handle->version = impl->version_counter().current_version();
  handle->packed = nullptr;
  handle->hooks = hooks;
  Py_INCREF(hooks);
  handle->previous = nullptr;
  handle->next = hooks->newest;
  if (hooks->newest != nullptr) hooks->newest->previous = handle;
  hooks->newest = handle;
  PyObject_GC_Track(handle);
  return reinterpret_cast<PyObject*>(handle);
}

int handle_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(handle_of(self)->packed);
  Py_VISIT(reinterpret_cast<PyObject*>(handle_of(self)->hooks));
  return 0;
}

int handle_clear(PyObject* self) {
  Py_CLEAR(handle_of(self)->packed);
  return 0;
}

void call_when_empty(Hooks* hooks) {
  PyObject* function = hooks->on_empty;
  hooks->on_empty = nullptr;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* answer = PyObject_CallNoArgs(function);
  if (answer == nullptr) PyErr_WriteUnraisable(function);
  Py_XDECREF(answer);
  Py_DECREF(function);
  PyErr_Restore(type, value, traceback);
}

void handle_dealloc(PyObject* self) {
  Handle* handle = handle_of(self);
  PyObject_GC_UnTrack(self);
  unlink(handle);
  Py_CLEAR(handle->packed);
  handle->tensor.~Tensor();
  std::destroy_at(&handle->save);
  PyTypeObject* type = Py_TYPE(self);
  Hooks* hooks = handle->hooks;
  PyObject_GC_Del(self);
  if (hooks->newest == nullptr && hooks->on_empty != nullptr) call_when_empty(hooks);
  Py_DECREF(hooks);
  Py_DECREF(type);
}

PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(handle_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(handle_clear)},
    {0, nullptr}};

PyType_Spec handle_spec = {"torchdelta_saved_hooks.Handle", sizeof(Handle), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, handle_slots};

// Return the tensor that a handle holds, or whose content is resident on the tape; undefined if it was dropped.
at::Tensor resident_tensor(const Handle* handle) {
  return handle->tensor.defined() ? handle->tensor : handle->save->resident(false);
}

bool is_modified(const Handle* handle) {
  if (!handle->tensor.defined()) return !handle->save->is_unmodified();
  return handle->tensor.unsafeGetTensorImpl()->version_counter().current_version() != handle->version;
}

// Return whether a handle still holds a tensor: not once it was adopted, or cleared by the garbage collector.
bool is_open(const Handle* handle) { return handle->tensor.defined() || handle->save; }

// Let a handle hold what the Python hook made of its tensor, unless a call inside that hook was faster. Takes it.
void set_packed(Handle* handle, PyObject* packed) {
  if (!is_open(handle)) {
    Py_DECREF(packed);
    return;
  }
  handle->packed = packed;
  handle->tensor.reset();
  handle->save.reset();
}

// -- lists of saved tensors

PyObject* saves_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *sizes, *numbers, *lanes;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyList_Type, &sizes, &PyList_Type, &numbers, &PyList_Type, &lanes)) {
    return nullptr;
  }
  if (PyList_GET_SIZE(sizes) != PyList_GET_SIZE(numbers) || PyList_GET_SIZE(sizes) != PyList_GET_SIZE(lanes)) {
    PyErr_SetString(PyExc_ValueError, "Saves takes three lists of the same length");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* saves = reinterpret_cast<Saves*>(self);
  saves->sizes = new std::vector<int64_t>(lists::from_python<int64_t>(sizes));
  saves->numbers = new std::vector<int64_t>(lists::from_python<int64_t>(numbers));
  saves->lanes = new std::vector<int64_t>(lists::from_python<int64_t>(lanes));
  if (PyErr_Occurred()) Py_CLEAR(self);
  return self;
}

void saves_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Saves*>(self)->sizes;
  delete reinterpret_cast<Saves*>(self)->numbers;
  delete reinterpret_cast<Saves*>(self)->lanes;
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot saves_slots[] = {{Py_tp_new, reinterpret_cast<void*>(saves_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(saves_dealloc)},
                             {0, nullptr}};

PyType_Spec saves_spec = {"torchdelta_saved_hooks.Saves", sizeof(Saves), 0, Py_TPFLAGS_DEFAULT, saves_slots};

}  // namespace
