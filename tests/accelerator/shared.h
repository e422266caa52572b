// What both stand-ins for an accelerator have: current devices and streams, views of memory, and each device's own random
// numbers.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <Python.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

namespace standin {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kNumDevices = 2;

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local c10::StreamId current_stream[kNumDevices] = {0, 0};

// A device's own stream of random numbers, drawn by a CPU generator that is never the CPU's default one.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl({kDevice, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
  mutable at::Generator inner;
};

inline at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex i = 0; i < kNumDevices; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return generators->at(index < 0 ? current_device : index);
}

// Which device and stream are current on a thread; what streams and events do is each stand-in's own.
struct CurrentGuard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = current_device;
    current_device = device.index() < 0 ? previous : device.index();
    return {kDevice, previous};
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), current_stream[with_index(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto previous = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return previous;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

 protected:
  static c10::Device with_index(c10::Device device) {
    return {kDevice, device.index() < 0 ? current_device : device.index()};
  }
};

// All but how a storage is resized.
struct CurrentHooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, current_device}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
};

// What native/device_watch.cpp has of CUDA's allocator: the bytes in use on a device, and their peak.
struct Watched {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> high{0};  // the most of these since `take_peak`

  void add(int64_t change_bytes) {
    const int64_t now = live.fetch_add(change_bytes) + change_bytes;
    int64_t before = high.load();
    while (now > before && !high.compare_exchange_weak(before, now)) {
    }
  }
};

inline Watched watched[kNumDevices];

inline std::atomic<int64_t> fails_from{0};

// Fail once if an allocation has at least the size for which a failure was asked.
inline void fail_if_asked(size_t size_bytes) {
  int64_t least_bytes = fails_from.load();
  if (least_bytes == 0 || static_cast<int64_t>(size_bytes) < least_bytes) return;
  TORCH_CHECK_WITH(OutOfMemoryError, !fails_from.compare_exchange_strong(least_bytes, 0), "the device is out of memory");
}

inline PyObject* fail_once(PyObject*, PyObject* least_bytes) {
  fails_from = PyLong_AsLongLong(least_bytes);
  Py_RETURN_NONE;
}

inline PyObject* live_capsule(PyObject*, PyObject* index) {
  return PyCapsule_New(&watched[PyLong_AsLong(index)].live, "torchdelta.live_bytes", nullptr);
}

inline PyObject* live_bytes(PyObject*, PyObject* index) {
  return PyLong_FromLongLong(watched[PyLong_AsLong(index)].live.load());
}

inline PyObject* take_peak(PyObject*, PyObject* index) {
  Watched& device = watched[PyLong_AsLong(index)];
  return PyLong_FromLongLong(device.high.exchange(device.live.load()));
}

#define STANDIN_WATCH_METHODS                                                                                     \
  {"live_capsule", live_capsule, METH_O, "Return a capsule with the address of the bytes in use on a device."},   \
      {"live_bytes", live_bytes, METH_O, "Return them."},                                                         \
      {"take_peak", take_peak, METH_O, "Return their peak since the last call."},                                 \
      {"fail_once", fail_once, METH_O, "Let the next allocation of so many bytes or more fail."}

inline PyObject* python_generator(PyObject*, PyObject* index) {
  return THPGenerator_Wrap(default_generator(static_cast<c10::DeviceIndex>(PyLong_AsLong(index))));
}

inline at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, c10::GetAllocator(kDevice), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kDevice), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// The same memory as another tensor, of the CPU; the caller keeps the first one alive.
inline at::Tensor alias_on_cpu(const at::Tensor& tensor) {
  auto storage = c10::Storage(
      c10::Storage::use_byte_size_t(),
      tensor.storage().nbytes(),
      c10::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::kCPU)));
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

inline at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.device().type() == kDevice ? alias_on_cpu(tensor) : tensor;
}

inline const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

inline at::Tensor as_strided(
    const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor,
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? std::make_optional(offset->expect_int()) : std::nullopt);
}

inline at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

inline at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline at::Tensor& set_source_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

inline at::Tensor& set_source_storage(at::Tensor& tensor, at::Storage source) { return at::native::set_(tensor, source); }

inline at::Tensor& set_source_storage_view(
    at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

// The ops that make tensors and views of them.
inline void implement_views(torch::Library& m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_source_storage_view);
  m.impl("view", view);
}

}  // namespace standin
