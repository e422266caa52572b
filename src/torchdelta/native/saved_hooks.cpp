// Saved-tensor hooks in C++, for steps that run unrecorded because they are known to fit (runtime/record/pause.py).
//
// Outside of such steps the hooks call the Python ones. During them, `pack` makes a small handle that shares the
// tensor's storage and version counter, and `unpack` returns the tensor: no Python runs. When recording begins again,
// `adopt` gives every living handle what the Python hook would have made of its tensor, so that everything saved so far
// can be evicted like any other saved tensor.
//
// `pack` also compares the sizes of the saved tensors with those of the last recorded step. The first one that is larger,
// or one more, calls back on the main thread, between two instructions of Python: such a step is not known to fit.
//
// Steps that are recorded in part (runtime/record/partial.py) are compared with a list of saved tensors: the size of each,
// and a number if it leaves, or if something is due when it is unpacked. Python packs these, or the tape (tape.cpp) saves
// them. All others get handles.
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <typeinfo>
#include <utility>
#include <vector>

#include "above_autograd.h"
#include "errors.h"
#include "graph_leaves.h"
#include "lists.h"
#include "saved_handles.h"
#include "tape.h"

namespace {

PyObject* hooks_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *pack, *unpack, *pack_odd, *on_modified, *on_larger, *keep_apart;
  if (!PyArg_ParseTuple(arguments, "OOOOOO", &pack, &unpack, &pack_odd, &on_modified, &on_larger, &keep_apart)) return nullptr;
  Hooks* hooks = hooks_of(type->tp_alloc(type, 0));  // zeroed, and tracked by the collector
  if (hooks == nullptr) return nullptr;
  hooks->pack = Py_NewRef(pack);
  hooks->unpack = Py_NewRef(unpack);
  hooks->pack_odd = Py_NewRef(pack_odd);
  hooks->on_modified = Py_NewRef(on_modified);
  hooks->on_larger = Py_NewRef(on_larger);
  hooks->keep_apart = Py_NewRef(keep_apart);
  hooks->sizes = new std::vector<int64_t>;
  hooks->expected = new std::vector<int64_t>;
  return reinterpret_cast<PyObject*>(hooks);
}

int hooks_traverse(PyObject* self, visitproc visit, void* arg) {
  Hooks* hooks = hooks_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(hooks->pack);
  Py_VISIT(hooks->unpack);
  Py_VISIT(hooks->pack_odd);
  Py_VISIT(hooks->on_modified);
  Py_VISIT(hooks->on_larger);
  Py_VISIT(hooks->keep_apart);
  Py_VISIT(hooks->on_other);
  Py_VISIT(hooks->pack_numbered);
  Py_VISIT(hooks->tape_owner);
  Py_VISIT(hooks->adopt_dropped);
  Py_VISIT(hooks->act);
  Py_VISIT(hooks->on_empty);
  return 0;
}

int hooks_clear(PyObject* self) {
  Hooks* hooks = hooks_of(self);
  hooks->is_paused = false;
  Py_CLEAR(hooks->pack);
  Py_CLEAR(hooks->unpack);
  Py_CLEAR(hooks->pack_odd);
  Py_CLEAR(hooks->on_modified);
  Py_CLEAR(hooks->on_larger);
  Py_CLEAR(hooks->keep_apart);
  hooks->is_compared = false;
  Py_CLEAR(hooks->saves);
  Py_CLEAR(hooks->on_other);
  Py_CLEAR(hooks->pack_numbered);
  hooks->is_on_tape = false;
  Py_CLEAR(hooks->adopt_dropped);
  Py_CLEAR(hooks->act);
  Py_CLEAR(hooks->on_empty);
  return 0;
}

void hooks_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  hooks_clear(self);
  Py_CLEAR(hooks_of(self)->tape_owner);  // handles use the tape, and keep the hooks alive
  delete hooks_of(self)->sizes;
  delete hooks_of(self)->expected;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* closed() {
  PyErr_SetString(PyExc_RuntimeError, "torchdelta: the hooks of this saved tensor have been deleted");
  return nullptr;
}

int call_on_larger(void* pointer) {
  auto* hooks = static_cast<Hooks*>(pointer);
  int status = 0;
  if (hooks->is_paused) {
    PyObject* answer = PyObject_CallNoArgs(hooks->on_larger);
    if (answer == nullptr) status = -1;
    Py_XDECREF(answer);
  }
  Py_DECREF(hooks);
  return status;
}

// Return the bytes of a tensor, 0 where it has no plain sizes.
int64_t size_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided) return 0;
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return 0;
  return tensor.numel() * static_cast<int64_t>(tensor.dtype().itemsize());
}

void compare_size(Hooks* hooks, int64_t size_bytes) {
  const size_t index = hooks->num_saved++;
  if (index < hooks->expected->size() && size_bytes <= (*hooks->expected)[index]) return;
  Py_INCREF(hooks);
  if (Py_AddPendingCall(&call_on_larger, hooks) != 0) Py_DECREF(hooks);  // full: the next saved tensor tries again
}

PyObject* pack_handle(Hooks* hooks, PyObject* argument) {
  if (!THPVariable_Check(argument)) return PyObject_CallOneArg(hooks->pack_odd, argument);
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  return tape::is_plain(tensor) ? new_handle(hooks, tensor) : PyObject_CallOneArg(hooks->pack_odd, argument);
}

// Return whether the step saves what it is expected to, and count that. Otherwise ask Python, which may fail.
bool is_expected(Hooks* hooks, int64_t size_bytes, bool* failed) {
  const size_t index = hooks->num_saved;
  const std::vector<int64_t>& sizes = *hooks->saves->sizes;
  if (index < sizes.size() && sizes[index] == size_bytes) {
    ++hooks->num_saved;
    return true;
  }
  hooks->is_compared = false;
  PyObject* answer = PyObject_CallFunction(hooks->on_other, "n", static_cast<Py_ssize_t>(index));
  *failed = answer == nullptr;
  Py_XDECREF(answer);
  return false;
}

// Do what Python does at a saved tensor on the tape. Return false if that failed.
bool act(Hooks* hooks, int64_t number, bool is_unpack) {
  const AboveAutograd guard_of_keys;
  PyObject* answer = PyObject_CallFunction(hooks->act, "LO", static_cast<long long>(number), is_unpack ? Py_True : Py_False);
  Py_XDECREF(answer);
  return answer != nullptr;
}

PyObject* pack_on_tape(Hooks* hooks, const at::Tensor& tensor, int64_t number, int64_t lane) {
  tape::SavePtr save = hooks->tape->save(tensor, number, (lane & kKept) != 0);
  PyObject* handle = new_handle(hooks, tensor, std::move(save));
  if (handle == nullptr) return nullptr;
  handle_of(handle)->is_due = (lane & kUnpackedInPython) != 0;
  if ((lane & kSavedInPython) != 0 && !act(hooks, number, false)) Py_CLEAR(handle);
  return handle;
}

PyObject* pack_numbered(Hooks* hooks, PyObject* argument, int64_t number, int64_t lane) {
  if (hooks->is_on_tape && lane != 0 && tape::is_plain(THPVariable_Unpack(argument))) {
    return pack_on_tape(hooks, THPVariable_Unpack(argument), number, lane);
  }
  return PyObject_CallFunction(hooks->pack_numbered, "OL", argument, static_cast<long long>(number));
}

// How many calls of `hooks_pack` run on this thread: all of them inside an op, which goes on afterwards.
thread_local int num_packing = 0;

struct Packing {
  Packing() { ++num_packing; }
  ~Packing() { --num_packing; }
};

PyObject* hooks_when_empty(PyObject* self, PyObject* function) {
  Py_XSETREF(hooks_of(self)->on_empty, Py_NewRef(function));
  Py_RETURN_NONE;
}

PyObject* hooks_is_in_op(PyObject*, PyObject*) { return PyBool_FromLong(num_packing > 0); }

PyObject* hooks_pack(PyObject* self, PyObject* argument) {
  Hooks* hooks = hooks_of(self);
  if (hooks->pack == nullptr) return closed();
  const Packing packing;
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::Fake);  // gate.cpp sees the ops of the program only
  const bool is_tensor = THPVariable_Check(argument);
  return with_errors([hooks, argument, is_tensor]() -> PyObject* {
    const int64_t size_bytes = is_tensor ? size_of(THPVariable_Unpack(argument)) : 0;
    if (hooks->is_compared) {
      bool failed = false;
      if (is_expected(hooks, size_bytes, &failed)) {
        const int64_t number = (*hooks->saves->numbers)[hooks->num_saved - 1];
        if (number < 0) return pack_handle(hooks, argument);
        return pack_numbered(hooks, argument, number, (*hooks->saves->lanes)[hooks->num_saved - 1]);
      }
      if (failed) return nullptr;
    }
    if (!hooks->is_paused) {
      const bool is_counted = hooks->sizes->size() < kMostSizes;
      if (is_counted) hooks->sizes->push_back(size_bytes);
      hooks->is_packing = is_counted;
      PyObject* packed = PyObject_CallOneArg(hooks->pack, argument);
      hooks->is_packing = false;
      return packed;
    }
    compare_size(hooks, size_bytes);
    return pack_handle(hooks, argument);
  });
}

PyObject* raise_modified(Hooks* hooks, const at::Tensor& tensor, uint32_t version) {
  PyObject* wrapped = THPVariable_Wrap(tensor);
  if (wrapped == nullptr) return nullptr;
  PyObject* answer = PyObject_CallFunction(hooks->on_modified, "OI", wrapped, version);
  Py_DECREF(wrapped);
  return answer;
}

// Return whether the backward of a custom Function runs. Its class is not exported, so its name is compared.
bool is_in_function() {
  const auto node = torch::autograd::get_current_node();  // of a type that depends on the version of torch
  return node && std::strcmp(typeid(*node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// Return a saved tensor to Python. See [Note: saved tensors that are gradients] in runtime/record/shared_gradients.py.
PyObject* wrap_unpacked(Hooks* hooks, at::Tensor tensor, size_t num_own_holders) {
  const bool is_shared = tensor.has_storage() && tensor.storage().use_count() > num_own_holders;
  PyObject* wrapped = THPVariable_Wrap(std::move(tensor));
  if (wrapped == nullptr || !is_shared || !is_in_function()) return wrapped;
  PyObject* answer = PyObject_CallOneArg(hooks->keep_apart, wrapped);
  if (answer == nullptr) Py_CLEAR(wrapped);
  Py_XDECREF(answer);
  return wrapped;
}

// Return a saved tensor that is on the tape. What the tape asks of Python may hand its content over to the Python hook.
PyObject* unpack_from_tape(Hooks* hooks, Handle* handle) {
  const tape::SavePtr save = handle->save;
  if (save->has_content() && !save->is_unmodified()) return raise_modified(hooks, save->resident(true), save->version());
  if (handle->is_due && !act(hooks, save->number(), true)) return nullptr;
  if (handle->packed == nullptr) hooks->tape->before_unpack(save);
  at::Tensor tensor;
  if (handle->packed == nullptr) tensor = save->has_content() ? hooks->tape->unpack(save) : handle->tensor;
  if (handle->packed != nullptr) return PyObject_CallOneArg(hooks->unpack, handle->packed);
  TORCH_CHECK(tensor.defined(), "torchdelta: a saved tensor was neither replayed nor handed over");
  return wrap_unpacked(hooks, std::move(tensor), save->has_content() ? 2 : 1);  // the new tensor, and the tape
}

PyObject* hooks_unpack(PyObject* self, PyObject* packed) {
  Hooks* hooks = hooks_of(self);
  if (hooks->unpack == nullptr) return closed();
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::Fake);  // as in `hooks_pack`
  if (Py_TYPE(packed) != handle_type) return PyObject_CallOneArg(hooks->unpack, packed);
  Handle* handle = handle_of(packed);
  if (handle->packed != nullptr) return PyObject_CallOneArg(hooks->unpack, handle->packed);
  return with_errors([hooks, handle]() -> PyObject* {
    const bool is_kept = handle->tensor.defined();
    if (is_kept && handle->tensor.unsafeGetTensorImpl()->version_counter().current_version() != handle->version) {
      return raise_modified(hooks, handle->tensor, handle->version);
    }
    if (handle->save) return unpack_from_tape(hooks, handle);
    return wrap_unpacked(hooks, handle->tensor, 1);
  });
}

PyObject* hooks_pause(PyObject* self, PyObject*) {
  hooks_of(self)->is_paused = true;
  hooks_of(self)->num_saved = 0;
  Py_RETURN_NONE;
}

PyObject* hooks_compare(PyObject* self, PyObject* arguments) {
  Hooks* hooks = hooks_of(self);
  PyObject *saves, *on_other, *pack_numbered;
  if (!PyArg_ParseTuple(arguments, "O!OO", saves_type, &saves, &on_other, &pack_numbered)) return nullptr;
  Py_XSETREF(hooks->saves, reinterpret_cast<Saves*>(Py_NewRef(saves)));
  Py_XSETREF(hooks->on_other, Py_NewRef(on_other));
  Py_XSETREF(hooks->pack_numbered, Py_NewRef(pack_numbered));
  hooks->is_compared = true;
  hooks->num_saved = 0;
  Py_RETURN_NONE;
}

PyObject* hooks_end_comparison(PyObject* self, PyObject*) {
  Hooks* hooks = hooks_of(self);
  const bool is_complete = hooks->is_compared && hooks->num_saved == hooks->saves->sizes->size();
  hooks->is_compared = hooks->is_on_tape = false;
  return PyBool_FromLong(is_complete);
}

PyObject* hooks_sizes(PyObject* self, PyObject*) { return lists::to_python(*hooks_of(self)->sizes); }

PyObject* hooks_num_sizes(PyObject* self, PyObject*) { return PyLong_FromSize_t(hooks_of(self)->sizes->size()); }

// Let Python pack what was dropped on the tape. Return false if that failed.
bool adopt_dropped(Hooks* hooks, std::vector<Handle*> handles) {
  handles.erase(std::remove_if(handles.begin(), handles.end(), [](const Handle* handle) { return !is_open(handle); }),
                handles.end());
  if (handles.empty()) return true;
  std::vector<tape::SavePtr> held;  // the capsules own nothing, and what Python does here may adopt the handles
  for (const Handle* handle : handles) held.push_back(handle->save);
  PyObject* saves = PyList_New(0);
  if (saves == nullptr) return false;
  for (const tape::SavePtr& save : held) {
    PyObject* capsule = PyCapsule_New(save.get(), tape::kSaveCapsule, nullptr);
    if (capsule != nullptr) PyList_Append(saves, capsule);
    Py_XDECREF(capsule);
  }
  PyObject* packed = PyErr_Occurred() == nullptr ? PyObject_CallOneArg(hooks->adopt_dropped, saves) : nullptr;
  Py_DECREF(saves);
  if (packed == nullptr) return false;
  if (!PyList_Check(packed) || PyList_GET_SIZE(packed) != static_cast<Py_ssize_t>(handles.size())) {
    PyErr_SetString(PyExc_TypeError, "adopt_dropped returns a list with an item for each saved tensor");
    Py_DECREF(packed);
    return false;
  }
  for (size_t index = 0; index < handles.size(); ++index) {
    set_packed(handles[index], Py_NewRef(PyList_GET_ITEM(packed, static_cast<Py_ssize_t>(index))));
  }
  Py_DECREF(packed);
  return true;
}

// Let Python pack what handles hold, in the order of saving: the newest is the first of them. Return how many it packed;
// negative if that failed.
long adopt_all(Hooks* hooks, const std::vector<Handle*>& handles) {
  std::vector<Handle*> dropped;
  long num_adopted = 0;
  for (auto handle = handles.rbegin(); handle != handles.rend(); ++handle) {
    // The last reference but ours may have died in a callback. A tensor that was modified since it was saved stays as
    // it is: its unpack raises. The hook may call `adopt` as well.
    if (Py_REFCNT(*handle) == 1 || !is_open(*handle) || is_modified(*handle)) continue;
    ++num_adopted;
    const at::Tensor tensor = resident_tensor(*handle);
    if (!tensor.defined()) {
      dropped.push_back(*handle);
      continue;
    }
    PyObject* wrapped = THPVariable_Wrap(tensor);
    PyObject* packed = wrapped != nullptr ? PyObject_CallOneArg(hooks->pack, wrapped) : nullptr;
    Py_XDECREF(wrapped);
    if (packed == nullptr) return -1;
    set_packed(*handle, packed);
  }
  return adopt_dropped(hooks, std::move(dropped)) ? num_adopted : -1;
}

PyObject* hooks_adopt(PyObject* self, PyObject*) {
  Hooks* hooks = hooks_of(self);
  const AboveAutograd guard_of_keys;
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::Fake);
  hooks->is_paused = hooks->is_compared = hooks->is_on_tape = false;
  hooks->sizes->clear();
  hooks->is_partial = true;  // this step equals no other one
  std::vector<Handle*> handles;
  for (Handle* handle = hooks->newest; handle != nullptr; handle = handle->next) {
    if (is_open(handle)) {
      Py_INCREF(handle);
      handles.push_back(handle);
    }
  }
  PyObject* answer = with_errors([hooks, &handles] {
    const long num_adopted = adopt_all(hooks, handles);
    return num_adopted < 0 ? nullptr : PyLong_FromLong(num_adopted);
  });
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  for (Handle* handle : handles) Py_DECREF(handle);
  PyErr_Restore(type, value, traceback);
  return answer;
}

PyObject* hooks_use_tape(PyObject* self, PyObject* arguments) {
  Hooks* hooks = hooks_of(self);
  PyObject *owner, *capsule, *adopt_dropped, *act;
  if (!PyArg_ParseTuple(arguments, "OOOO", &owner, &capsule, &adopt_dropped, &act)) return nullptr;
  auto* tape = static_cast<tape::Tape*>(PyCapsule_GetPointer(capsule, tape::kCapsule));
  if (tape == nullptr) return nullptr;
  hooks->tape = tape;
  hooks->is_on_tape = true;
  Py_XSETREF(hooks->tape_owner, Py_NewRef(owner));
  Py_XSETREF(hooks->adopt_dropped, Py_NewRef(adopt_dropped));
  Py_XSETREF(hooks->act, Py_NewRef(act));
  Py_RETURN_NONE;
}

PyObject* hooks_end_step(PyObject* self, PyObject*) {
  Hooks* hooks = hooks_of(self);
  hooks->num_saved = 0;
  hooks->is_compared = false;
  if (hooks->is_paused) Py_RETURN_TRUE;
  int64_t first_bytes = -1;  // of the new step, whose first tensor is being packed
  if (hooks->is_packing && !hooks->sizes->empty()) {
    first_bytes = hooks->sizes->back();
    hooks->sizes->pop_back();
  }
  const bool is_same =
      hooks->has_expected && !hooks->is_partial && hooks->sizes->size() < kMostSizes && *hooks->sizes == *hooks->expected;
  hooks->has_expected = !hooks->is_partial;
  hooks->is_partial = false;
  hooks->expected->swap(*hooks->sizes);
  hooks->sizes->clear();
  if (first_bytes >= 0) hooks->sizes->push_back(first_bytes);
  return PyBool_FromLong(is_same);
}

PyObject* hooks_num_saved(PyObject* self, PyObject*) { return PyLong_FromSize_t(hooks_of(self)->num_saved); }

PyObject* hooks_num_handles(PyObject* self, PyObject*) {
  long num_handles = 0;
  for (Handle* handle = hooks_of(self)->newest; handle != nullptr; handle = handle->next) ++num_handles;
  return PyLong_FromLong(num_handles);
}

PyMethodDef hooks_methods[] = {
    {"pack", hooks_pack, METH_O, "The pack hook."},
    {"unpack", hooks_unpack, METH_O, "The unpack hook."},
    {"pause", hooks_pause, METH_NOARGS, "Make handles, without Python, from now on."},
    {"adopt", hooks_adopt, METH_NOARGS,
     "Call the Python hooks from now on, and pack with them what the living handles hold. Return their number."},
    {"compare", hooks_compare, METH_VARARGS,
     "Compare what this step saves from here on with a list: (saves, on_other, pack_numbered)."},
    {"use_tape", hooks_use_tape, METH_VARARGS,
     "Save on a tape what the list says, until the end of the comparison: (owner, capsule, adopt_dropped, act)."},
    {"end_comparison", hooks_end_comparison, METH_NOARGS,
     "Call the Python hooks from now on. Return whether the step has saved all that the list has."},
    {"sizes", hooks_sizes, METH_NOARGS, "Return the sizes of what Python has packed in this step."},
    {"num_sizes", hooks_num_sizes, METH_NOARGS, "Return how many these are, the running one included."},
    {"end_step", hooks_end_step, METH_NOARGS,
     "Begin a new step. Return whether a recorded one saved tensors of the same sizes as the recorded one before it."},
    {"num_saved", hooks_num_saved, METH_NOARGS, "Return how many tensors this step has saved, if it is not recorded."},
    {"num_handles", hooks_num_handles, METH_NOARGS, "Return the number of living handles."},
    {"when_empty", hooks_when_empty, METH_O, "Call a function once, as soon as no handle lives."},
    {"is_in_op", hooks_is_in_op, METH_NOARGS, "Return whether a tensor is being packed on this thread, by an op."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot hooks_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(hooks_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(hooks_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(hooks_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(hooks_clear)},
    {Py_tp_methods, hooks_methods},
    {0, nullptr}};

PyType_Spec hooks_spec = {"torchdelta_saved_hooks.Hooks", sizeof(Hooks), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                          hooks_slots};

PyMethodDef module_methods[] = {
    {"are_same_leaves", graph_leaves::are_same, METH_VARARGS,
     "Return whether a backward has these leaves: (outputs, weak references, has_no_gradient); None: ask Python."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchdelta_saved_hooks", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_torchdelta_saved_hooks() {
  PyObject* self = PyModule_Create(&module);
  if (self == nullptr) return nullptr;
  PyObject* type = PyType_FromSpec(&hooks_spec);
  handle_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&handle_spec));
  saves_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&saves_spec));
  if (type == nullptr || handle_type == nullptr || saves_type == nullptr ||
      PyModule_AddObject(self, "Saves", Py_NewRef(reinterpret_cast<PyObject*>(saves_type))) < 0 ||
      PyModule_AddObject(self, "Hooks", type) < 0) {
    Py_XDECREF(type);
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}
