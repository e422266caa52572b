// What the gate does with each op; gate.cpp makes it a Python type, and has the overview.
#pragma once
#include <Python.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <memory>
#include <vector>

#include "above_autograd.h"
#include "home_stream.h"
#include "known_storages.h"
#include "op_hash.h"
#include "tape.h"

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeTLS;
using known_storages::KnownStorages;
using op_hash::hash_of;
using Mode = c10::impl::PyObject_TorchDispatchMode;

constexpr DispatchKey kKey = DispatchKey::Fake;

enum class State {
  kOff,        // every op goes to its kernel
  kRecording,  // every op is recorded; none is counted
  kLearning,   // every op is recorded, and its hash becomes the next one of the sequence
  kFollowing,  // ops are compared with the sequence
  kEnded,      // the recorder is on the thread's stack again; an op that was dispatched before is still recorded
};

enum class Writes : int8_t { kUnknown, kNothing, kArguments };
enum class Again : int8_t { kUnknown, kNo, kYes };

struct Op {
  uint64_t hash;
  int64_t need_bytes;  // of its outputs, and what it allocated inside itself
  int64_t recorded;    // a sum of tape::Recorded
  Writes writes = Writes::kUnknown;  // what the schema says, once it was asked
  Again again = Again::kUnknown;     // whether it may run once more after it has failed; the same
};

struct Sequence {
  PyObject_HEAD
  std::vector<Op>* ops;
};

struct Gate {
  PyObject_HEAD
  PyObject* mode;       // the recorder; `shared_mode` holds the reference
  PyObject* counter;    // owns `live`
  PyObject* on_other;   // (position): an op differs from the sequence
  PyObject* make_room;  // (need_bytes): an op might pass the budget
  PyObject* on_unseen;  // (tensors): an op that no mode sees is about to write them. Returns what to call afterwards
  const std::atomic<int64_t>* live;
  std::shared_ptr<Mode>* shared_mode;
  State state;
  size_t position;  // of the next op of the sequence
  Sequence* sequence;
  std::vector<uint64_t>* learned;
  int64_t most_bytes;  // the budget
  KnownStorages* known;
  HomeStream* stream;
  bool is_on_cpu;
  PyObject* tape_owner;
  tape::Tape* tape;  // null: there is none in this step
};

PyTypeObject* sequence_type = nullptr;
thread_local Gate* current = nullptr;
Gate* gate_of(PyObject* self) { return reinterpret_cast<Gate*>(self); }

// -- the fallback

struct WithInterpreter {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithInterpreter() { PyGILState_Release(state); }
};

void ask(PyObject* function, int64_t argument) {
  const AboveAutograd guard_of_keys;
  const WithInterpreter guard;
  PyObject* answer = PyObject_CallFunction(function, "L", static_cast<long long>(argument));
  if (answer == nullptr) throw python_error();
  Py_DECREF(answer);
}

// This key notes autocast's state at the start of each op for the recorder. It is a second fallback for all ops, so it is
// off where few are recorded: `record` notes the state below autocast, which is the same for ops that are not cast.
void set_snapshot() {
  if (TorchDispatchModeTLS::stack_len() > 0) return;
  const bool is_on = current != nullptr && current->state != State::kOff && current->state != State::kFollowing;
  c10::impl::tls_set_dispatch_key_included(DispatchKey::PythonTLSSnapshot, is_on);
}

struct WithMode {
  explicit WithMode(const std::shared_ptr<Mode>& mode) { TorchDispatchModeTLS::push_non_infra_mode_onto_stack(mode); }
  ~WithMode() {
    TorchDispatchModeTLS::pop_stack();
    set_snapshot();  // with the last mode torch switches that off
  }
};

// Torch makes a tensor of a subclass, such as a parameter, from an alias that must not have a Python object yet. It takes
// the stack of dispatch modes away meanwhile: no mode may see the alias. The recorder records no aliases anyway.
bool makes_alias(const c10::OperatorHandle& op) {
  static const c10::OperatorHandle detach = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
  static const c10::OperatorHandle alias = c10::Dispatcher::singleton().findSchemaOrThrow("aten::alias", "");
  return op == detach || op == alias;
}

// Call a function with each storage in a value.
template <typename Function>
void for_each_storage(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (!value.toTensor().defined()) return;
    tape::for_each_part(value.toTensor(), [&function](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.has_storage()) function(tensor.unsafeGetTensorImpl()->unsafe_storage());
    });
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_storage(item, function);
  }
}

void know(Gate* gate, const torch::jit::Stack& stack, size_t begin) {
  for (size_t index = begin; index < stack.size(); ++index) {
    for_each_storage(stack[index], [gate](const c10::Storage& storage) { gate->known->add(storage); });
  }
}

bool writes_arguments(Op& expected, const c10::OperatorHandle& op) {
  if (expected.writes == Writes::kUnknown) {
    expected.writes = tape::writes_arguments(op) ? Writes::kArguments : Writes::kNothing;
  }
  return expected.writes == Writes::kArguments;
}

bool writes_known(const Gate* gate, const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (gate->known->empty()) return false;
  bool found = false;
  const auto look = [gate, &found](const c10::Storage& storage) { found = found || gate->known->contains(storage); };
  tape::for_each_written(op, stack, [&look](const c10::IValue& value) { for_each_storage(value, look); });
  return found;
}

void record(Gate* gate, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::shared_ptr<Mode> mode = *gate->shared_mode;
  const size_t begin = stack->size() - op.schema().arguments().size();
  know(gate, *stack, begin);
  WithMode guard(mode);
  at::impl::MaybeSetTLSOnEntryGuard snapshot;
  op.callBoxedForDispatchKey(DispatchKey::Python, *stack);
  if (gate == current) know(gate, *stack, begin);
}

bool is_on_top(const Gate* gate) {
  const int64_t height = TorchDispatchModeTLS::stack_len();
  return height > 0 && !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python) &&
         TorchDispatchModeTLS::get_stack_at(height - 1)->ptr(getPyInterpreter()) == gate->mode;
}

// Learn or compare an alias. If it differs, the next op does as well.
void compare_alias(Gate* gate, const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (gate->state == State::kLearning) {
    gate->learned->push_back(hash_of(op, stack));
    ++gate->position;
  } else if (gate->state == State::kFollowing) {
    const std::vector<Op>& ops = *gate->sequence->ops;
    const bool is_same = gate->position < ops.size() && ops[gate->position].hash == hash_of(op, stack);
    gate->position = is_same ? gate->position + 1 : ops.size() + 1;
  }
}

// Run an op that is the next one of the sequence, and record it if need be. Return false if it has not run.
bool follow(Gate* gate, const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack) {
  // Python may take over from the tape in each of these calls (`gate->tape` is null then), or change the sequence.
  Op& expected = (*gate->sequence->ops)[gate->position++];
  const int64_t recorded = expected.recorded;
  const int64_t need_bytes = expected.need_bytes;
  const bool is_on_tape = gate->tape != nullptr && (recorded & tape::kOnTape) != 0;
  if (writes_arguments(expected, op)) {
    const bool is_known = writes_known(gate, op, *stack), had_tape = gate->tape != nullptr;
    if (gate->tape != nullptr && (is_known || !is_on_tape)) gate->tape->before_write(op, *stack);
    if (gate->state != State::kFollowing) return false;
    if (is_known || (had_tape && gate->tape == nullptr)) return record(gate, op, stack), true;
  }
  if (gate->tape != nullptr ? recorded == tape::kInPython : recorded != 0) return record(gate, op, stack), true;
  if (need_bytes > 0 && gate->live->load(std::memory_order_relaxed) + need_bytes > gate->most_bytes) {
    ask(gate->make_room, need_bytes);
  }
  if (!is_on_tape || gate->tape == nullptr || gate->state != State::kFollowing) return false;
  if (gate->tape->record(op, below, stack, need_bytes, recorded)) return true;
  if (gate->state != State::kFollowing) return false;
  return record(gate, op, stack), true;
}

// Return whether an op may run once more after it has failed: it neither writes its arguments nor draws numbers.
bool may_run_again(Op& expected, const c10::OperatorHandle& op) {
  if (expected.again == Again::kUnknown) {
    const bool is_torchs = op.operator_name().name.rfind("aten::", 0) == 0;
    const bool may = is_torchs && !writes_arguments(expected, op) && !op.hasTag(at::Tag::nondeterministic_seeded);
    expected.again = may ? Again::kYes : Again::kNo;
  }
  return expected.again == Again::kYes;
}

// Run an op where it has to run now: in the recorder, if that is on the thread's stack again.
void finish(const Gate* gate, const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack) {
  if (gate->state != State::kEnded || !is_on_top(gate)) return op.redispatchBoxed(below, stack);
  at::impl::MaybeSetTLSOnEntryGuard snapshot;
  op.callBoxedForDispatchKey(DispatchKey::Python, *stack);
}

// Run an op of a step that is followed. Where the device has no memory left although the budget has (fragments, another
// process), recording resumes, and the recorder runs it, which evicts what can leave.
void run_followed(Gate* gate, const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack) {
  const auto run = [gate, &op, below, stack] {
    if (!follow(gate, op, below, stack)) finish(gate, op, below, stack);
  };
  if (gate->is_on_cpu || !may_run_again((*gate->sequence->ops)[gate->position], op)) return run();
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const c10::SmallVector<c10::IValue, 12> arguments(begin, stack->end());
  const size_t height = stack->size() - arguments.size();
  try {
    return run();
  } catch (const c10::OutOfMemoryError&) {
    if (gate->state == State::kFollowing) ask(gate->on_other, static_cast<int64_t>(gate->position));
    if (gate->state != State::kEnded || !is_on_top(gate)) throw;
  }
  stack->resize(height);
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  finish(gate, op, below, stack);
}

// A reference to a Python object.
struct Reference {
  explicit Reference(PyObject* object) : object(object) {
    if (object == nullptr) throw python_error();
  }
  ~Reference() { Py_DECREF(object); }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  PyObject* const object;
};

// Ask Python to end the contents of the tensors that an op is about to write. Return what to call when it has run.
PyObject* begin_unseen(Gate* gate, const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const AboveAutograd guard_of_keys;
  const WithInterpreter guard;
  const Reference written(PyList_New(0));
  const auto add = [&written](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const Reference wrapped(THPVariable_Wrap(tensor));
    if (PyList_Append(written.object, wrapped.object) < 0) throw python_error();
  };
  tape::for_each_written(op, stack, [&add](const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    }
  });
  PyObject* then = PyObject_CallOneArg(gate->on_unseen, written.object);
  if (then == nullptr) throw python_error();
  return then;
}

void end_unseen(PyObject* then) {
  const AboveAutograd guard_of_keys;
  const WithInterpreter guard;
  PyObject* answer = PyObject_CallNoArgs(then);
  Py_DECREF(then);
  if (answer == nullptr) throw python_error();
  Py_DECREF(answer);
}

// Run an op that no mode would see: a tensor subclass runs it with dispatch disabled. If it writes what a replay might
// read, Python ends the old content before it runs, and begins a new one afterwards.
void run_unseen(Gate* gate, const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack) {
  const bool is_on = gate->state != State::kOff && gate->state != State::kEnded;
  if (!is_on || !tape::writes_arguments(op)) return op.redispatchBoxed(below, stack);
  const bool had_tape = gate->tape != nullptr;
  if (had_tape) gate->tape->before_write(op, *stack);
  const bool has_left_tape = had_tape && gate->tape == nullptr;
  if (!has_left_tape && !writes_known(gate, op, *stack)) return op.redispatchBoxed(below, stack);
  PyObject* then = begin_unseen(gate, op, *stack);
  try {
    op.redispatchBoxed(below, stack);
  } catch (...) {
    end_unseen(then);
    throw;
  }
  end_unseen(then);
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);  // what the op and the recorder call is no op of the step
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  Gate* gate = current;
  const bool sees_nothing = c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python);  // no mode would see the op
  if (gate == nullptr) return op.redispatchBoxed(below, stack);
  if (sees_nothing) return run_unseen(gate, op, below, stack);
  if (makes_alias(op)) {
    compare_alias(gate, op, *stack);
    return op.redispatchBoxed(below, stack);
  }
  switch (gate->state) {
    case State::kOff:
      break;
    case State::kRecording:
      return record(gate, op, stack);
    case State::kLearning:
      gate->learned->push_back(hash_of(op, *stack));
      ++gate->position;
      return record(gate, op, stack);
    case State::kFollowing: {
      const std::vector<Op>& ops = *gate->sequence->ops;
      const size_t position = gate->position;
      if (position >= ops.size() || ops[position].hash != hash_of(op, *stack) || !gate->stream->is_current()) {
        ask(gate->on_other, static_cast<int64_t>(position));
        if (gate->state == State::kRecording) return record(gate, op, stack);  // a new step begins with this op
        if (gate->tape != nullptr) gate->tape->before_write(op, *stack);  // recording resumes later: see `end`
        break;
      }
      return run_followed(gate, op, below, stack);
    }
    case State::kEnded:
      break;
  }
  finish(gate, op, below, stack);
}

}  // namespace
