// Finds tensors whose memory another library has allocated.
#pragma once
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace tape {

struct WithInterpreter {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithInterpreter() { PyGILState_Release(state); }
};

// Return the function that frees memory which torch has not allocated: that of `from_numpy`, `frombuffer` and DLPack.
inline c10::DeleterFnPtr outside_deleter() {
  static char memory = 0;
  return at::from_blob(&memory, {1}, [](void*) {}, at::kByte).storage().data_ptr().get_deleter();
}

inline bool is_parameter(const at::Tensor& tensor) {
  PyObject* wrapped = THPVariable_Wrap(tensor);
  if (wrapped == nullptr) throw python_error();
  const bool found = PyType_IsSubtype(Py_TYPE(wrapped), reinterpret_cast<PyTypeObject*>(ParameterClass)) != 0;
  Py_DECREF(wrapped);
  return found;
}

// Return whether code outside of torch may fill a tensor's memory anew at any time, and Python has to decide. `outside`:
// what `outside_deleter` returns. See [Note: memory outside of torch] in runtime/state/outside_memory.py.
inline bool is_outside_memory(const at::Tensor& tensor, c10::DeleterFnPtr outside) {
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (!tensor.is_cpu() || storage->resizable()) return false;
  if (storage->data_ptr().get_deleter() != outside) return false;
  const WithInterpreter interpreter;
  return !is_parameter(tensor) && !(tensor.is_view() && is_parameter(at::Tensor(tensor._base())));
}

}  // namespace tape
