// Describes to Python all that saved tensors need: contents, the ops that make them, and how these see others.
//
// A *builder* is a Python object with the methods that are called here (runtime/record/handover.py). Contents are named
// by numbers, and described before anything that sees them.
#pragma once
#include <Python.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <unordered_set>
#include <utility>
#include <vector>

#include "tape_content.h"

namespace tape {

class Describer {
 public:
  explicit Describer(PyObject* builder) : builder_(py::reinterpret_borrow<py::object>(builder)) {}

  // Describe a content, after all that it is made of.
  void describe(Content* wanted) {
    std::vector<std::pair<Content*, bool>> waiting{{wanted, false}};
    while (!waiting.empty()) {
      const auto [content, is_ready] = waiting.back();
      waiting.pop_back();
      if (seen_.count(content) != 0) continue;
      if (const c10::Storage storage = content->resident()) {
        seen_.insert(content);
        describe_resident(*content, storage);
      } else if (is_ready) {
        describe_made(*content);
      } else {
        TORCH_CHECK(content->op, cannot_be_made(*content));
        waiting.emplace_back(content, true);
        content->op->for_each_source([&waiting](Content* source) { waiting.emplace_back(source, false); });
      }
    }
  }

  py::object view(const View& view) const {
    return builder_.attr("view")(name_of(view.content.get()), sizes(view.sizes), sizes(view.strides), view.offset,
                                 dtype(view));
  }

  py::object save(const NativeSave& save) const {
    const at::Tensor probe = save.resident(true);
    return builder_.attr("save")(view(save.view), py::reinterpret_steal<py::object>(THPVariable_Wrap(probe)),
                                 save.version(), save.number());
  }

 private:
  static uintptr_t name_of(const Content* content) { return reinterpret_cast<uintptr_t>(content); }

  static py::tuple sizes(const c10::DimVector& numbers) {
    py::tuple tuple(numbers.size());
    for (size_t index = 0; index < numbers.size(); ++index) tuple[index] = numbers[index];
    return tuple;
  }

  static py::object dtype(const View& view) {
    return py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(c10::typeMetaToScalarType(view.dtype))));
  }

  // Describe a content by a tensor on its storage: the one by whose version it is watched, else one of bytes with the
  // version counter that shows writes to the content.
  void describe_resident(const Content& content, const c10::Storage& storage) const {
    at::Tensor tensor = content.watched();
    uint32_t version = content.version;
    if (!tensor.defined() || !Content::is_on(tensor, storage)) {
      const bool is_exchanged = tensor.defined();
      tensor = bytes_of(storage, static_cast<int64_t>(storage.nbytes()));
      if (is_exchanged) {
        version = 0;
      } else if (content.counter.has_value()) {
        tensor.unsafeGetTensorImpl()->set_version_counter(*content.counter);
      }
    }
    builder_.attr("resident")(name_of(&content), py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)), version);
  }

  py::object value(const Argument& argument, int64_t size_bytes) const {
    switch (argument.kind) {
      case Argument::Kind::kValue:
        return torch::jit::toPyObject(argument.value);
      case Argument::Kind::kOverwritten: {
        const View& seen = *argument.views.front();
        return builder_.attr("fresh")(sizes(seen.sizes), sizes(seen.strides), seen.offset, dtype(seen), size_bytes);
      }
      case Argument::Kind::kTensor:
      case Argument::Kind::kWritten:
        return view(*argument.views.front());
      case Argument::Kind::kScratch:
        return builder_.attr("scratch")(sizes(argument.views.front()->sizes), dtype(*argument.views.front()));
      case Argument::Kind::kList:
        break;
    }
    py::list list;
    for (const std::optional<View>& item : argument.views) list.append(item.has_value() ? view(*item) : py::none());
    return list;
  }

  // Describe an op that makes a wanted content, and what else it makes that is missing.
  void describe_made(const Content& wanted) {
    const Entry& entry = *wanted.op;
    py::list args, outputs;
    py::dict kwargs;
    const auto& arguments = entry.op.schema().arguments();
    for (size_t index = 0; index < arguments.size(); ++index) {
      const py::object item = value(entry.arguments[index], wanted.size_bytes);
      if (arguments[index].kwarg_only()) {
        kwargs[arguments[index].name().c_str()] = item;
      } else {
        args.append(item);
      }
    }
    for (const WeakContent& output : entry.outputs) {
      const ContentPtr content = output.lock();
      if (!content || content->resident() || !seen_.insert(content.get()).second) continue;
      outputs.append(py::make_tuple(name_of(content.get()), content->output_index, content->size_bytes));
    }
    py::object random_state = py::none();
    if (entry.random_state.defined()) {
      random_state = py::make_tuple(torch::jit::toPyObject(entry.generator), torch::jit::toPyObject(entry.random_state));
    }
    const auto& name = entry.op.operator_name();
    builder_.attr("made")(name.name, name.overload_name, args, kwargs, entry.grad_enabled, entry.need_bytes, random_state,
                          outputs);
  }

  py::object builder_;
  std::unordered_set<const Content*> seen_;
};

// Return what the builder makes of each saved tensor.
inline PyObject* describe(const std::vector<SavePtr>& saves, PyObject* builder) {
  try {
    Describer describer(builder);
    for (const SavePtr& save : saves) describer.describe(static_cast<NativeSave*>(save.get())->view.content.get());
    py::list packed;
    for (const SavePtr& save : saves) packed.append(describer.save(*static_cast<NativeSave*>(save.get())));
    return packed.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

}  // namespace tape
