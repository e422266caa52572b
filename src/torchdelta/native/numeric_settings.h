// The settings of torch that kernels read besides their arguments. A replay runs only under those of the forward.
#pragma once
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace tape {

using Environment = std::array<int64_t, 21>;

// Return a setting; -1 where old and new settings are mixed, which torch refuses.
template <typename Function>
int64_t unless_mixed(const Function& read) {
  try {
    return static_cast<int64_t>(read());
  } catch (const c10::Error&) {
    return -1;
  }
}

// Return the settings that kernels on a device read: see `numeric_environment` in _torch/device.py.
inline Environment environment_of(c10::Device device) {
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  const at::Context& context = at::globalContext();
  Environment all{};
  size_t size = 0;
  const auto add = [&all, &size](auto value) { all.at(size++) = static_cast<int64_t>(value); };
  add(unless_mixed([&context] { return context.float32MatmulPrecision(); }));
  for (const Op op : {Op::MATMUL, Op::CONV, Op::RNN}) add(context.float32Precision(Backend::MKLDNN, op));
  add(c10::get_default_dtype_as_scalartype());
  add(context.userEnabledMkldnn());
  add(context.deterministicMkldnn());
  add(context.userEnabledNNPACK());
  add(context.deterministicAlgorithms());
  add(context.deterministicAlgorithmsWarnOnly());
  if (device.is_cpu()) {
    // Each thread has its own, and a backward on the CPU runs where it was started.
    add(at::get_num_threads());
    const volatile double least_normal = std::numeric_limits<double>::min();
    add(least_normal * 0.5 == 0.0);  // whether denormal numbers are flushed, which torch sets, but does not tell
    return all;
  }
  for (const Op op : {Op::MATMUL, Op::CONV, Op::RNN}) add(context.float32Precision(Backend::CUDA, op));
  add(unless_mixed([&context] { return context.allowTF32CuDNN(); }));
  add(context.userEnabledCuDNN());
  add(context.benchmarkCuDNN());
  add(context.deterministicCuDNN());
  add(context.allowFP16ReductionCuBLAS());
  add(context.allowBF16ReductionCuBLAS());
  add(context.allowFP16AccumulationCuBLAS());
  return all;
}

}  // namespace tape
