// A stand-in accelerator: device memory, streams, events, generators and allocator statistics on an ordinary CPU.
//
// It is to CUDA what a rehearsal is to the concert. The autograd engine gives its backward a thread of its own for each
// device, storages live on a device that is not the CPU, allocations are rounded to 512 bytes and counted, each device
// has its own random generator, and freed memory is overwritten, so that whoever reads it reads NaN. Kernels are the
// CPU's own, on copies, and have run when the call returns.
#include <ATen/Context.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "shared.h"

namespace {

using namespace standin;

constexpr size_t kBlockBytes = 512;

std::atomic<c10::StreamId> next_stream{1};

struct Event {
  std::chrono::steady_clock::time_point at;
};

struct Guard final : CurrentGuard {
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), next_stream++);
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->at = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    const auto passed = static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void free_on_device(void* pointer);

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    const c10::Device device{kDevice, current_device};
    if (size_bytes == 0) return {nullptr, nullptr, &free_on_device, device};
    fail_if_asked(size_bytes);
    const size_t rounded_bytes = (size_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    void* pointer = std::aligned_alloc(kBlockBytes, rounded_bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, pointer != nullptr, "the stand-in device is out of memory");
    std::memset(pointer, 0xFF, rounded_bytes);
    std::lock_guard<std::mutex> guard(lock);
    blocks[pointer] = {rounded_bytes, current_device};
    watched[current_device].add(static_cast<int64_t>(rounded_bytes));
    for (auto* stat : {&stats[current_device].active_bytes, &stats[current_device].allocated_bytes}) {
      (*stat)[0].increase(rounded_bytes);
    }
    return {pointer, pointer, &free_on_device, device};
  }
  void release(void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    const auto found = blocks.find(pointer);
    for (auto* stat : {&stats[found->second.second].active_bytes, &stats[found->second.second].allocated_bytes}) {
      (*stat)[0].decrease(found->second.first);
    }
    watched[found->second.second].add(-static_cast<int64_t>(found->second.first));
    std::memset(pointer, 0xFF, found->second.first);
    blocks.erase(found);
    std::free(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    default_copy_data(target, source, size_bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    stats[device].active_bytes[0].reset_accumulated();
    stats[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock);
    stats[device].active_bytes[0].reset_peak();
    stats[device].allocated_bytes[0].reset_peak();
  }

  std::mutex lock;
  std::unordered_map<void*, std::pair<size_t, c10::DeviceIndex>> blocks;
  c10::CachingDeviceAllocator::DeviceStats stats[kNumDevices];
};

Allocator& allocator = *new Allocator;  // never destroyed: storages die after static objects do

void free_on_device(void* pointer) {
  if (pointer != nullptr) allocator.release(pointer);
}

struct Hooks final : CurrentHooks {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::OptionalDeviceGuard guard(impl->device());
    c10::DataPtr data = allocator.allocate(size_bytes);
    if (impl->data() != nullptr && size_bytes > 0) {
      std::memcpy(data.get(), impl->data(), std::min(size_bytes, impl->nbytes()));
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size_bytes);
  }
};

// -- the few ops that a device has to bring itself; the CPU does the rest, on copies

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_cpu(tensor).item(); }

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  return tensor.defined() ? tensor.to(device) : tensor;
}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef output_padding,
    int64_t groups) {
  std::optional<at::Tensor> cpu_bias;
  if (bias.has_value() && bias->defined()) cpu_bias = on_cpu(*bias);
  const auto out = at::convolution(
      on_cpu(input), on_cpu(weight), cpu_bias, stride, padding, dilation, transposed, output_padding, groups);
  return on_device(out, input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  const std::vector<int64_t> bias_sizes{gradient.size(1)};
  const auto outs = at::convolution_backward(
      on_cpu(gradient), on_cpu(input), on_cpu(weight), bias_sizes, stride, padding, dilation, transposed,
      output_padding, groups, mask);
  const auto device = input.device();
  return {
      on_device(std::get<0>(outs), device), on_device(std::get<1>(outs), device), on_device(std::get<2>(outs), device)};
}

// The CPU's kernel on copies. A random op draws from the device's generator, and leaves the CPU's as it was.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  const size_t num_arguments = op.schema().arguments().size();
  at::Generator drawing = default_generator(-1);
  for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) {
    auto& argument = (*stack)[i];
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().device().type() == kDevice) {
      drawing = default_generator(argument.toTensor().device().index());
    }
  }
  for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) {
    auto& argument = (*stack)[i];
    if (argument.isGenerator()) {
      drawing = argument.toGenerator();
      argument = c10::IValue();
    }
  }
  static std::mutex& lock = *new std::mutex;  // the CPU's generator is one for all threads
  const std::lock_guard<std::mutex> guard(lock);
  auto cpu = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  const auto saved = cpu.get_state();
  cpu.set_state(drawing.get_state());
  at::native::cpu_fallback(op, stack);
  drawing.set_state(cpu.get_state());
  cpu.set_state(saved);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  implement_views(m);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

PyMethodDef methods[] = {
    STANDIN_WATCH_METHODS,
    {"default_generator", python_generator, METH_O, "Return the generator that a device draws from."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "standin", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_standin() {
  c10::SetAllocator(kDevice, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return PyModule_Create(&module);
}
