// The gate: sees the ops of a followed step in C++, and lets only those be recorded that its program replays.
// It is a fallback on the dispatch key `Fake`, which lies below autograd and the Python key and has no kernels in stock
// torch. The key is switched on for one thread, outside of backwards. A recorded step teaches the gate a *sequence*: for
// each op a hash of its identity and of the shapes, dtypes and integers of its arguments, what it needed, and whether it
// has to be recorded. In later steps each op is compared with the sequence. An op that has to be recorded goes to the
// recorder, which is a dispatch mode in Python, or to the tape (tape.cpp); all others go to their kernels at once. If an
// op differs, or might pass the budget, Python is asked before it runs (runtime/record/partial.py).
//
// Two steps with the same sequence may still write different tensors (`slots[step % 2].copy_(x)`). So an op is also
// recorded if it writes a storage that the recorder knows: a replay might read it, or an op might be known to have made
// its content. The gate notes the storages of what recorded ops read and return; `forget` clears that.
//
// On an accelerator, an op on another stream than the one that was current when `follow` was called counts as one that
// differs. If an op finds no memory there, the recorder runs it again, which makes room.
#include <Python.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <memory>
#include <vector>

#include "above_autograd.h"
#include "errors.h"
#include "home_stream.h"
#include "known_storages.h"
#include "lists.h"
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
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !tensor.has_storage()) return;
    function(tensor.unsafeGetTensorImpl()->unsafe_storage());
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

void fallback(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);  // what the op and the recorder call is no op of the step
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  Gate* gate = current;
  const bool sees_nothing = c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python);  // no mode would see the op
  if (gate == nullptr || sees_nothing) return op.redispatchBoxed(below, stack);
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

c10::RegistrationHandleRAII& registration() {
  static auto& handle = *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
      kKey, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "torchdelta"));
  return handle;
}

PyObject* install(PyObject*, PyObject*) {
  static bool is_installed = false;
  if (!is_installed && c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey)) Py_RETURN_FALSE;
  registration();
  is_installed = true;
  Py_RETURN_TRUE;
}

// -- sequences

PyObject* sequence_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *hashes, *needs, *recorded;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyList_Type, &hashes, &PyList_Type, &needs, &PyList_Type, &recorded)) {
    return nullptr;
  }
  if (PyList_GET_SIZE(needs) != PyList_GET_SIZE(hashes) || PyList_GET_SIZE(recorded) != PyList_GET_SIZE(hashes)) {
    PyErr_SetString(PyExc_ValueError, "a sequence takes three lists of the same length");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  const auto all_hashes = lists::from_python<uint64_t>(hashes);
  const auto all_needs = lists::from_python<int64_t>(needs);
  const auto all_recorded = lists::from_python<int64_t>(recorded);
  auto* ops = reinterpret_cast<Sequence*>(self)->ops = new std::vector<Op>;
  ops->reserve(all_hashes.size());
  for (size_t index = 0; index < all_hashes.size(); ++index) {
    ops->push_back(Op{all_hashes[index], all_needs[index], all_recorded[index]});
  }
  if (PyErr_Occurred()) Py_CLEAR(self);
  return self;
}

void sequence_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Sequence*>(self)->ops;
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot sequence_slots[] = {{Py_tp_new, reinterpret_cast<void*>(sequence_new)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(sequence_dealloc)},
                                {0, nullptr}};

PyType_Spec sequence_spec = {"torchdelta_gate.Sequence", sizeof(Sequence), 0, Py_TPFLAGS_DEFAULT, sequence_slots};

// -- gates

PyObject* gate_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *mode, *device, *counter, *live, *on_other, *make_room;
  if (!PyArg_ParseTuple(arguments, "OO!OOOO", &mode, &THPDeviceType, &device, &counter, &live, &on_other, &make_room)) {
    return nullptr;
  }
  auto* count = static_cast<const std::atomic<int64_t>*>(PyCapsule_GetPointer(live, "torchdelta.live_bytes"));
  if (count == nullptr) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Gate* gate = gate_of(self);
  gate->mode = mode;
  gate->counter = Py_NewRef(counter);
  gate->on_other = Py_NewRef(on_other);
  gate->make_room = Py_NewRef(make_room);
  gate->live = count;
  gate->shared_mode = new std::shared_ptr<Mode>(std::make_shared<Mode>(Py_NewRef(mode), getPyInterpreter()));
  gate->learned = new std::vector<uint64_t>;
  gate->known = new KnownStorages;
  gate->stream = new HomeStream(reinterpret_cast<THPDevice*>(device)->device);
  gate->is_on_cpu = reinterpret_cast<THPDevice*>(device)->device.is_cpu();
  return self;
}

int gate_traverse(PyObject* self, visitproc visit, void* arg) {
  Gate* gate = gate_of(self);
  Py_VISIT(Py_TYPE(self));
  if (gate->shared_mode != nullptr && gate->shared_mode->use_count() == 1) Py_VISIT(gate->mode);
  Py_VISIT(gate->counter);
  Py_VISIT(gate->on_other);
  Py_VISIT(gate->make_room);
  Py_VISIT(gate->tape_owner);
  return 0;
}

void turn(Gate* gate, State state) {
  gate->state = state;
  const bool is_on = state != State::kOff;
  if (is_on) {
    current = gate;
  } else if (current == gate) {
    current = nullptr;
  } else {
    return;  // it is that of another thread, or was turned off before
  }
  c10::impl::tls_set_dispatch_key_included(kKey, is_on);
  set_snapshot();
}

int gate_clear(PyObject* self) {
  Gate* gate = gate_of(self);
  turn(gate, State::kOff);
  gate->mode = nullptr;
  if (gate->shared_mode != nullptr) gate->shared_mode->reset();
  Py_CLEAR(gate->counter);
  Py_CLEAR(gate->on_other);
  Py_CLEAR(gate->make_room);
  Py_CLEAR(gate->sequence);
  gate->tape = nullptr;
  Py_CLEAR(gate->tape_owner);
  return 0;
}

void gate_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  gate_clear(self);
  delete gate_of(self)->shared_mode;
  delete gate_of(self)->learned;
  delete gate_of(self)->known;
  delete gate_of(self)->stream;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* gate_record(PyObject* self, PyObject*) {
  turn(gate_of(self), State::kRecording);
  Py_RETURN_NONE;
}

PyObject* gate_learn(PyObject* self, PyObject*) {
  Gate* gate = gate_of(self);
  gate->learned->clear();
  gate->position = 0;
  turn(gate, State::kLearning);
  Py_RETURN_NONE;
}

PyObject* gate_follow(PyObject* self, PyObject* arguments) {
  PyObject* sequence;
  long long most_bytes;
  if (!PyArg_ParseTuple(arguments, "O!L", sequence_type, &sequence, &most_bytes)) return nullptr;
  Gate* gate = gate_of(self);
  Py_XSETREF(gate->sequence, reinterpret_cast<Sequence*>(Py_NewRef(sequence)));
  gate->most_bytes = most_bytes;
  gate->position = 0;
  return with_errors([gate] {
    gate->stream->begin();
    turn(gate, State::kFollowing);
    return Py_NewRef(Py_None);
  });
}

PyObject* gate_end(PyObject* self, PyObject*) {
  turn(gate_of(self), State::kEnded);
  Py_RETURN_NONE;
}

PyObject* gate_close(PyObject* self, PyObject*) {
  turn(gate_of(self), State::kOff);
  Py_RETURN_NONE;
}

PyObject* gate_know(PyObject* self, PyObject* argument) {
  if (THPVariable_Check(argument)) {
    for_each_storage(c10::IValue(THPVariable_Unpack(argument)),
                     [self](const c10::Storage& storage) { gate_of(self)->known->add(storage); });
  }
  Py_RETURN_NONE;
}

PyObject* gate_use_tape(PyObject* self, PyObject* arguments) {
  PyObject *owner, *capsule;
  if (!PyArg_ParseTuple(arguments, "OO", &owner, &capsule)) return nullptr;
  Gate* gate = gate_of(self);
  gate->tape = nullptr;
  if (capsule != Py_None) {
    gate->tape = static_cast<tape::Tape*>(PyCapsule_GetPointer(capsule, tape::kCapsule));
    if (gate->tape == nullptr) return nullptr;
    Py_XSETREF(gate->tape_owner, Py_NewRef(owner));
  }
  Py_RETURN_NONE;
}

PyObject* gate_forget(PyObject* self, PyObject*) {
  gate_of(self)->known->clear();
  Py_RETURN_NONE;
}

PyObject* gate_is_complete(PyObject* self, PyObject*) {
  const Gate* gate = gate_of(self);
  return PyBool_FromLong(gate->state == State::kFollowing && gate->position == gate->sequence->ops->size());
}

PyObject* gate_learned(PyObject* self, PyObject*) { return lists::to_python(*gate_of(self)->learned); }

PyObject* gate_position(PyObject* self, void*) { return PyLong_FromSize_t(gate_of(self)->position); }

PyGetSetDef gate_attributes[] = {
    {"position", gate_position, nullptr, "How many ops of the sequence there were so far, the running one included.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef gate_methods[] = {
    {"record", gate_record, METH_NOARGS, "Record every op of this thread."},
    {"learn", gate_learn, METH_NOARGS, "Record every op from here on, and learn the sequence."},
    {"follow", gate_follow, METH_VARARGS, "Compare the ops from here on with a sequence, within so many bytes."},
    {"end", gate_end, METH_NOARGS, "The recorder is on the stack again: record what was dispatched before."},
    {"close", gate_close, METH_NOARGS, "See no op from now on."},
    {"know", gate_know, METH_O, "Record every later op that writes the storage of a tensor."},
    {"forget", gate_forget, METH_NOARGS, "Forget which storages the recorder has seen."},
    {"use_tape", gate_use_tape, METH_VARARGS, "Record on a tape from here on: (owner, capsule); (None, None): on none."},
    {"is_complete", gate_is_complete, METH_NOARGS, "Return whether the sequence was followed to its end."},
    {"learned", gate_learned, METH_NOARGS, "Return the hashes of the ops since `learn`."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot gate_slots[] = {{Py_tp_new, reinterpret_cast<void*>(gate_new)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(gate_dealloc)},
                            {Py_tp_traverse, reinterpret_cast<void*>(gate_traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(gate_clear)},
                            {Py_tp_getset, gate_attributes},
                            {Py_tp_methods, gate_methods},
                            {0, nullptr}};

PyType_Spec gate_spec = {"torchdelta_gate.Gate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, gate_slots};

PyMethodDef module_methods[] = {
    {"install", install, METH_NOARGS,
     "Register the fallback. Repeated calls do nothing. Return False if there is another one."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "torchdelta_gate", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit_torchdelta_gate() {
  PyObject* self = PyModule_Create(&module);
  if (self == nullptr) return nullptr;
  PyObject* gate_type = PyType_FromSpec(&gate_spec);
  sequence_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&sequence_spec));
  if (gate_type == nullptr || sequence_type == nullptr || PyModule_AddObject(self, "Gate", gate_type) < 0 ||
      PyModule_AddObject(self, "Sequence", Py_NewRef(reinterpret_cast<PyObject*>(sequence_type))) < 0) {
    Py_XDECREF(gate_type);
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}
