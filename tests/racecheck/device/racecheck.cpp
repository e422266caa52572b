// An accelerator that computes and copies late, in an order that a scheduler chooses, and reports every race.
//
// Beside tests/accelerator/standin.cpp, whose kernels have run when their call returns. Here a kernel is an entry of
// its stream's queue; memory that is freed has a new user at once; and a checker compares each access with the earlier
// ones. See docs/design for what that proves.

#include "kernels.h"

namespace {

using namespace racecheck;

c10::StreamId next_stream = 1;
constexpr c10::StreamId kNumStreams = 32;  // as many as CUDA has in its pool: the next stream is the first again

struct Event {
  std::shared_ptr<Mark> mark;
};

struct Guard final : CurrentGuard {
  c10::Stream getNewStream(c10::Device device, int) const override {
    const Lock guard(queues.lock);
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), (next_stream++ - 1) % kNumStreams + 1);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const Lock guard(queues.lock);
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->mark = queues.mark(key_of(stream.device_index(), stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Lock guard(queues.lock);
    if (event != nullptr) queues.follow(key_of(stream.device_index(), stream.id()), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    const Lock guard(queues.lock);
    return event == nullptr || queues.is_reached(static_cast<Event*>(event)->mark);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);  // the autograd engine does, for what crosses streams
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    const Lock guard(queues.lock);
    if (event != nullptr) queues.wait(static_cast<Event*>(event)->mark);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const Lock guard(queues.lock);
    queues.wait_for_stream(key_of(stream.device_index(), stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    const Lock guard(queues.lock);
    queues.settle();
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Lock guard(queues.lock);
    return queues.is_reached(queues.mark(key_of(stream.device_index(), stream.id())));
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    const Lock guard(queues.lock);
    const auto &start = static_cast<Event*>(first)->mark, &end = static_cast<Event*>(second)->mark;
    TORCH_CHECK(start->is_reached && end->is_reached, "both events must be reached before their times are compared");
    return 1e3 * (end->time_s - start->time_s);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : CurrentHooks {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::OptionalDeviceGuard guard(impl->device());
    c10::DataPtr data = allocator.allocate(size_bytes);
    const size_t copied_bytes = std::min(size_bytes, impl->nbytes());
    if (impl->data() != nullptr && copied_bytes > 0) {
      const auto from = reinterpret_cast<uintptr_t>(impl->data()), to = reinterpret_cast<uintptr_t>(data.get());
      const Lock lock(queues.lock);
      queues.queue(
          current_key(current_device), "a resize", {{from, from + copied_bytes, false}, {to, to + copied_bytes, true}},
          [from, to, copied_bytes] {
            std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), copied_bytes);
          });
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size_bytes);
  }
};

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}

c10::OperatorHandle op_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, Stack* stack) { launch(op_named("aten::convolution"), stack); }

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  constexpr size_t kNumArguments = 10;  // then the sizes of the bias stand behind the weight
  const auto gradient = (*stack)[stack->size() - kNumArguments].toTensor();
  stack->insert(stack->end() - (kNumArguments - 3), c10::IValue(std::vector<int64_t>{gradient.size(1)}));
  launch(op_named("aten::convolution_backward"), stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  implement_views(m);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }

// -- for Python

PyObject* nothing() { Py_RETURN_NONE; }

PyObject* set_mode(PyObject*, PyObject* arguments) {
  int mode;
  unsigned long long seed;
  if (!PyArg_ParseTuple(arguments, "iK", &mode, &seed)) return nullptr;
  const Lock guard(queues.lock);
  queues.set_mode(static_cast<Mode>(mode), seed);
  return nothing();
}

PyObject* set_script(PyObject*, PyObject* answers) {
  std::vector<int> script;
  for (Py_ssize_t i = 0; i < PyList_Size(answers); ++i) {
    script.push_back(static_cast<int>(PyLong_AsLong(PyList_GetItem(answers, i))));
  }
  const Lock guard(queues.lock);
  queues.set_script(std::move(script));
  return nothing();
}

// The questions of this run: what each was answered, and what stood in the device when it was asked.
PyObject* questions(PyObject*, PyObject*) {
  const Lock guard(queues.lock);
  auto* made = PyList_New(0);
  for (size_t i = 0; i < queues.answers().size(); ++i) {
    auto* one = Py_BuildValue("(iK)", queues.answers()[i], static_cast<unsigned long long>(queues.keys()[i]));
    PyList_Append(made, one);
    Py_DECREF(one);
  }
  return made;
}

PyObject* take_complaints(PyObject*, PyObject*) {
  const Lock guard(queues.lock);
  auto* made = PyList_New(0);
  for (const auto& text : queues.checker.take_complaints()) {
    auto* one = PyUnicode_FromString(text.c_str());
    PyList_Append(made, one);
    Py_DECREF(one);
  }
  return made;
}

PyObject* complain(PyObject*, PyObject* text) {
  const char* said = PyUnicode_AsUTF8(text);
  if (said == nullptr) return nullptr;
  const Lock guard(queues.lock);
  queues.checker.complain(said);
  return nothing();
}

PyObject* counts(PyObject*, PyObject*) {
  const Lock guard(queues.lock);
  std::string names;
  for (const auto& name : names_at_launch) names += name + " ";
  return Py_BuildValue(
      "{s:K,s:K,s:K,s:K,s:K,s:K,s:s}", "num_kernels", static_cast<unsigned long long>(queues.num_kernels), "num_marks",
      static_cast<unsigned long long>(queues.num_marks), "num_questions",
      static_cast<unsigned long long>(queues.num_questions), "num_reused",
      static_cast<unsigned long long>(allocator.num_reused), "num_at_launch",
      static_cast<unsigned long long>(num_at_launch.load()), "log", static_cast<unsigned long long>(queues.log),
      "names_at_launch", names.c_str());
}

PyObject* pin(PyObject*, PyObject* arguments) {
  unsigned long long start, size_bytes;
  if (!PyArg_ParseTuple(arguments, "KK", &start, &size_bytes)) return nullptr;
  const Lock guard(queues.lock);
  queues.checker.begin(start, start + size_bytes, kHost, queues.host);
  return nothing();
}

PyObject* unpin(PyObject*, PyObject* start) {
  const Lock guard(queues.lock);
  queues.checker.unpin(PyLong_AsUnsignedLongLong(start), queues.host);
  queues.run_all();  // the memory is unmapped next: a copy that is late would end the process
  return nothing();
}

PyObject* on_host(PyObject*, PyObject* arguments) {
  unsigned long long start, size_bytes;
  int is_write;
  const char* what;
  if (!PyArg_ParseTuple(arguments, "KKps", &start, &size_bytes, &is_write, &what)) return nullptr;
  const Lock guard(queues.lock);
  queues.on_host({start, start + size_bytes, is_write != 0}, what);
  return nothing();
}

PyObject* settle(PyObject*, PyObject*) {
  const Lock guard(queues.lock);
  queues.settle();
  return nothing();
}

PyObject* reset(PyObject*, PyObject*) {
  const Lock guard(queues.lock);
  queues.settle();
  allocator.forget();
  queues.reset();
  next_stream = 1;
  return nothing();
}

PyMethodDef methods[] = {
    STANDIN_WATCH_METHODS,
    {"default_generator", python_generator, METH_O, "Return the generator that a device draws from."},
    {"set_mode", set_mode, METH_VARARGS, "Say who chooses the order: 0 nobody, 1 a seed, 2 a script."},
    {"set_script", set_script, METH_O, "Say what the next questions about events find; afterwards: not reached."},
    {"questions", questions, METH_NOARGS, "Return what was asked since `set_script`: answers and states."},
    {"take_complaints", take_complaints, METH_NOARGS, "Return the races and uses after free, and forget them."},
    {"complain", complain, METH_O, "Report something that Python has seen, beside the races."},
    {"counts", counts, METH_NOARGS, "Return what was queued so far."},
    {"pin", pin, METH_VARARGS, "Let copies use this host memory without waiting for the host."},
    {"unpin", unpin, METH_O, "Undo `pin`; a copy that may still use the memory is reported."},
    {"on_host", on_host, METH_VARARGS, "Note that the host itself reads or writes pinned memory."},
    {"settle", settle, METH_NOARGS, "Run all that is queued."},
    {"reset", reset, METH_NOARGS, "Run all that is queued, and forget the past."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "racecheck", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_racecheck() {
  Queues::pristine();
  Queues::pristine_keys();
  c10::SetAllocator(kDevice, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return PyModule_Create(&module);
}
