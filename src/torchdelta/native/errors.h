// with_errors: what a function of a module throws becomes Python's error, of the same type as in torch's own functions.
#pragma once
#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include <exception>

namespace {

// Run a function, and return what it returns; null, with Python's error, if it throws.
template <typename Function>
PyObject* with_errors(const Function& function) {
  try {
    return function();
  } catch (python_error& error) {
    error.restore();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

}  // namespace
