// Lists of whole numbers: between Python's and C++'s.
#pragma once
#include <Python.h>

#include <type_traits>
#include <vector>

namespace lists {

// Return a new list; null, with an error set, if there is no memory for it.
template <typename Integer>
PyObject* to_python(const std::vector<Integer>& numbers) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t index = 0; list != nullptr && index < numbers.size(); ++index) {
    PyObject* number = std::is_unsigned_v<Integer> ? PyLong_FromUnsignedLongLong(numbers[index])
                                                   : PyLong_FromLongLong(static_cast<long long>(numbers[index]));
    if (number == nullptr) {
      Py_CLEAR(list);
      break;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(index), number);
  }
  return list;
}

// Return the numbers in a list. If one is none, or too large, an error is set.
template <typename Integer>
std::vector<Integer> from_python(PyObject* list) {
  std::vector<Integer> numbers;
  numbers.reserve(static_cast<size_t>(PyList_GET_SIZE(list)));
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(list); ++index) {
    PyObject* item = PyList_GET_ITEM(list, index);
    numbers.push_back(std::is_unsigned_v<Integer> ? static_cast<Integer>(PyLong_AsUnsignedLongLong(item))
                                                  : static_cast<Integer>(PyLong_AsLongLong(item)));
  }
  return numbers;
}

}  // namespace lists
