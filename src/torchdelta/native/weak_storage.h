// WeakStorage: a weak reference to a c10::StorageImpl, by its address.
//
// It is made from an address while the storage is alive. From then on the memory of the StorageImpl itself is not
// reused (the data is freed with the last reference): the address names this storage only, and its reference count can
// be read after its death. It is not a strong reference and creates no Python object for the storage: the autograd
// engine accumulates in place only if a storage has one reference.
#pragma once
#include <Python.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace weak_storage {

struct Object {
  PyObject_HEAD
  c10::StorageImpl* storage;  // this object holds one weak reference
};

inline c10::StorageImpl* storage_of(PyObject* self) { return reinterpret_cast<Object*>(self)->storage; }

inline PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0) {
    PyErr_SetString(PyExc_TypeError, "WeakStorage takes no keyword arguments");
    return nullptr;
  }
  PyObject* address = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!:WeakStorage", &PyLong_Type, &address)) return nullptr;
  auto* storage = static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(address));
  if (storage == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "WeakStorage needs the address of a live storage, not 0");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  c10::raw::weak_intrusive_ptr::incref(storage);
  reinterpret_cast<Object*>(self)->storage = storage;
  return self;
}

inline void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  c10::raw::weak_intrusive_ptr::decref(storage_of(self));
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* num_holders(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(c10::raw::weak_intrusive_ptr::use_count(storage_of(self)));
}

inline PyObject* deleter(PyObject* self, PyObject*) {
  return PyLong_FromVoidPtr(reinterpret_cast<void*>(storage_of(self)->data_ptr().get_deleter()));
}

inline PyMethodDef methods[] = {
    {"num_holders", num_holders, METH_NOARGS, "Return the number of references to the storage; 0 if it is dead."},
    {"deleter", deleter, METH_NOARGS, "Return the address of the function that will free the memory of a live storage."},
    {nullptr, nullptr, 0, nullptr}};

inline PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr}};

inline PyType_Spec spec = {"torchdelta_counting.WeakStorage", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace weak_storage
