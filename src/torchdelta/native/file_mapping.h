// Lets an empty storage have pieces of a file as its memory, as a private mapping: pages are read when they are touched,
// and pages that are written belong to the process alone. See [Note: mapped back] in runtime/memory/emptying.py.
#pragma once
#include <Python.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <utility>
#include <vector>

namespace file_mapping {

struct Piece {
  long long offset_bytes, size_bytes;  // multiples of the page
};

struct Mapping {
  void* start;
  size_t size_bytes;
  PyObject* keeper;
};

// Runs on whichever thread drops the storage's memory.
inline void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  munmap(mapping->start, mapping->size_bytes);
  if (Py_IsInitialized()) {  // else the interpreter has ended, and its objects with it
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(mapping->keeper);
    PyGILState_Release(state);
  }
  delete mapping;
}

inline bool read_pieces(PyObject* list, std::vector<Piece>& pieces) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    Piece piece{};
    PyObject* item = PyList_GET_ITEM(list, i);
    if (!PyTuple_Check(item)) {
      PyErr_SetString(PyExc_TypeError, "a piece is a tuple of an offset and a size");
      return false;
    }
    if (!PyArg_ParseTuple(item, "LL", &piece.offset_bytes, &piece.size_bytes)) return false;
    pieces.push_back(piece);
  }
  return true;
}

// Map the pieces one after the other. Return nullptr, with errno set, if that is not possible.
inline char* map_all(int descriptor, const std::vector<Piece>& pieces, size_t all_bytes) {
  const int flags = MAP_PRIVATE | MAP_NORESERVE;
  void* start = mmap(nullptr, all_bytes, PROT_NONE, flags | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  char* place = static_cast<char*>(start);
  for (const Piece& piece : pieces) {
    const int may = PROT_READ | PROT_WRITE;
    if (mmap(place, piece.size_bytes, may, flags | MAP_FIXED, descriptor, piece.offset_bytes) == MAP_FAILED) {
      const int error = errno;
      munmap(start, all_bytes);
      errno = error;
      return nullptr;
    }
    place += piece.size_bytes;
  }
  return static_cast<char*>(start);
}

inline PyObject* map_pieces(PyObject*, PyObject* arguments) {
  PyObject *address = nullptr, *list = nullptr, *keeper = nullptr;
  Py_ssize_t size_bytes = 0;
  int descriptor = -1;
  if (!PyArg_ParseTuple(arguments, "O!niO!O", &PyLong_Type, &address, &size_bytes, &descriptor, &PyList_Type, &list,
                        &keeper)) {
    return nullptr;
  }
  auto* storage = static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(address));
  std::vector<Piece> pieces;
  if ((storage == nullptr && PyErr_Occurred()) || !read_pieces(list, pieces)) return nullptr;
  size_t all_bytes = 0;
  for (const Piece& piece : pieces) all_bytes += static_cast<size_t>(piece.size_bytes);
  if (storage == nullptr || !storage->device().is_cpu() || storage->nbytes() != 0 || size_bytes <= 0 ||
      all_bytes < static_cast<size_t>(size_bytes)) {
    PyErr_SetString(PyExc_ValueError, "only an empty storage on the CPU can be mapped, from pieces of at least its size");
    return nullptr;
  }
  char* start = map_all(descriptor, pieces, all_bytes);
  if (start == nullptr) return PyErr_SetFromErrno(PyExc_OSError);
  auto* mapping = new Mapping{start, all_bytes, Py_NewRef(keeper)};
  c10::DataPtr memory(start, mapping, &unmap, storage->device());
  try {
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(static_cast<size_t>(size_bytes));
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    return nullptr;
  }
  Py_RETURN_NONE;
}

inline PyObject* free_pieces(PyObject*, PyObject* arguments) {
  int descriptor = -1;
  PyObject* list = nullptr;
  std::vector<Piece> pieces;
  if (!PyArg_ParseTuple(arguments, "iO!", &descriptor, &PyList_Type, &list) || !read_pieces(list, pieces)) {
    return nullptr;
  }
#ifdef FALLOC_FL_PUNCH_HOLE
  Py_BEGIN_ALLOW_THREADS;
  for (const Piece& piece : pieces) {
    if (fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, piece.offset_bytes, piece.size_bytes) != 0) {
      break;  // the file system cannot
    }
  }
  Py_END_ALLOW_THREADS;
#endif
  Py_RETURN_NONE;
}

}  // namespace file_mapping
