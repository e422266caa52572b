// The leaves that a backward accumulates into, without a Python object for every node of its graph: a followed step
// compares them before each backward (runtime/record/known_backward.py).
#pragma once
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>
#include <vector>

#include "errors.h"

namespace graph_leaves {

using torch::autograd::Node;

// Return the leaves of the graph below these nodes, in the order of `leaves_of` in runtime/record/headroom.py. The
// caller keeps the nodes alive.
inline std::vector<at::Tensor> below(std::vector<Node*> stack) {
  std::vector<at::Tensor> leaves;
  std::unordered_set<Node*> seen;
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    if (!seen.insert(node).second) continue;
    if (const auto* accumulates = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      if (accumulates->variable.defined()) leaves.push_back(accumulates->variable);
      continue;
    }
    for (const auto& edge : node->next_edges()) {
      if (edge.is_valid()) stack.push_back(edge.function.get());
    }
  }
  return leaves;
}

// Return whether a leaf is what a weak reference of Python refers to; -1 with an error set.
inline int is_referent(const at::Tensor& leaf, PyObject* reference) {
  PyObject* referent = PyObject_CallNoArgs(reference);
  if (referent == nullptr) return -1;
  const bool is_same = THPVariable_Check(referent) &&
                       THPVariable_Unpack(referent).unsafeGetTensorImpl() == leaf.unsafeGetTensorImpl();
  Py_DECREF(referent);
  return is_same;
}

// Compare leaves with what `are_same` is given.
inline PyObject* compare(const std::vector<at::Tensor>& leaves, PyObject* references, PyObject* has_no_gradient) {
  const auto num_leaves = static_cast<Py_ssize_t>(leaves.size());
  if (num_leaves != PyList_GET_SIZE(references) || num_leaves != PyTuple_GET_SIZE(has_no_gradient)) Py_RETURN_FALSE;
  for (Py_ssize_t index = 0; index < num_leaves; ++index) {
    const at::Tensor& leaf = leaves[static_cast<size_t>(index)];
    const int is_same = is_referent(leaf, PyList_GET_ITEM(references, index));
    if (is_same < 0) return nullptr;
    if (is_same == 0) Py_RETURN_FALSE;
    if (torch::autograd::impl::post_acc_grad_hooks(leaf) != nullptr) Py_RETURN_NONE;  // they may have been removed
    if (leaf.grad().defined() == (PyTuple_GET_ITEM(has_no_gradient, index) == Py_True)) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// A method of a module: takes a tuple of outputs, a list of weak references to leaves, and a tuple that says of each leaf
// whether it has no gradient. Returns whether a backward from the outputs has these leaves, and they are so; None if
// Python has to find out.
inline PyObject* are_same(PyObject*, PyObject* arguments) {
  PyObject *outputs, *references, *has_no_gradient;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyTuple_Type, &outputs, &PyList_Type, &references, &PyTuple_Type,
                        &has_no_gradient)) {
    return nullptr;
  }
  std::vector<Node*> roots;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(outputs); ++index) {
    PyObject* output = PyTuple_GET_ITEM(outputs, index);
    if (!THPVariable_Check(output)) Py_RETURN_NONE;
    try {
      if (const auto& node = THPVariable_Unpack(output).grad_fn()) roots.push_back(node.get());
    } catch (const std::exception&) {  // a view of which torch refuses to tell what made it
    }
  }
  return with_errors([&roots, references, has_no_gradient] {
    return compare(below(std::move(roots)), references, has_no_gradient);
  });
}

}  // namespace graph_leaves
