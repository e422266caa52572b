// Kernels that run later: what a call needs is captured by value and by address, and its outputs are allocated at once.
//
// As on CUDA, a queued kernel holds no tensor: it knows addresses. If the memory has a new user when the kernel runs,
// the kernel reads and writes what is that user's.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <sstream>
#include <unordered_map>

#include "memory.h"

namespace racecheck {

using Stack = torch::jit::Stack;

inline bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

// The bytes that a tensor spans.
inline Range range_of(const at::Tensor& tensor, bool is_write) {
  const auto base = reinterpret_cast<uintptr_t>(tensor.storage().data());
  if (tensor.numel() == 0) return {0, 0, is_write};
  if (base == 0) {  // on CUDA an illegal access, which breaks the whole process
    const Lock guard(queues.lock);
    queues.checker.complain("use after free: a tensor whose storage was resized to 0 bytes");
    TORCH_CHECK(false, "a tensor's memory was freed: its storage was resized to 0 bytes");
  }
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto item = tensor.itemsize();
  return {base + tensor.storage_offset() * item, base + (last + 1) * item, is_write};
}

inline at::Tensor meta_of(const at::Tensor& tensor) {
  if (!is_here(tensor) && tensor.dim() == 0) return tensor;  // a number: ops take it from the host beside any device
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// A tensor of the host as it is at the launch. No tensor of inference mode: it may run, and be written, outside of it.
inline at::Tensor captured(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::InferenceMode plain(false);
  const at::AutoDispatchBelowADInplaceOrView below;  // which that guard has undone
  if (is_here(tensor)) return on_cpu(tensor);
  auto made = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Replace every tensor in an argument.
template <typename F>
void map_tensors(c10::IValue& value, const F& change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& one : value.toTensorVector()) made.push_back(one.defined() ? change(one) : one);
    value = std::move(made);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& one : value.toOptionalTensorVector()) {
      made.push_back(one.has_value() && one->defined() ? std::optional<at::Tensor>(change(*one)) : std::nullopt);
    }
    value = std::move(made);
  }
}

template <typename F>
void each_tensor(const c10::IValue& value, const F& visit) {
  c10::IValue copy = value;
  map_tensors(copy, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

struct Shape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  std::optional<at::ScalarType> dtype;  // none: undefined
};

// What an op returns and what it resizes, found on meta tensors.
struct Shapes {
  bool is_known = false;
  std::vector<std::vector<Shape>> returned;
  std::vector<bool> is_list;
  std::vector<std::vector<int64_t>> written;  // the sizes of the arguments that are single tensors and written
};

inline Shape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

inline bool is_statistic(const c10::OperatorHandle& op, const c10::Argument& argument) {
  return op.schema().name().find("batch_norm") != std::string::npos &&
      op.schema().name().find("backward") == std::string::npos &&
      (argument.name() == "running_mean" || argument.name() == "running_var");
}

// Whether an op says that it does not train: then a batch norm reads its statistics, whatever its schema says.
inline bool only_infers(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& named = op.schema().arguments();
  for (size_t i = 0; i < named.size(); ++i) {
    if (named[i].name() == "training" && arguments[i].isBool()) return !arguments[i].toBool();
  }
  return false;
}

// Whether an op writes to an argument. The schemas of some batch norms do not name their statistics.
inline bool writes_to(const c10::OperatorHandle& op, const c10::Argument& argument, const Stack& arguments) {
  if (is_statistic(op, argument)) return !only_infers(op, arguments);
  return is_written(argument);
}

// Means of a layer norm in half precision are float32 on other devices; the CPU has them in the type of its input.
inline void give_statistics_of_cpu(const c10::OperatorHandle& op, Stack& values) {
  if (op.schema().name() != "aten::native_layer_norm_backward") return;
  const auto dtype = values[1].toTensor().scalar_type();
  if (values[5].isTensor() && values[5].toTensor().defined() && values[5].toTensor().scalar_type() != dtype) return;
  for (const size_t place : {3, 4}) values[place] = values[place].toTensor().to(dtype);
}

inline std::string signature(const c10::OperatorHandle& op, const Stack& arguments) {
  std::ostringstream out;
  out << op.schema().name() << '.' << op.schema().overload_name();
  for (const auto& argument : arguments) {
    if (argument.isTensor() || argument.isTensorList() || argument.isOptionalTensorList()) {
      out << '[';
      each_tensor(argument, [&](const at::Tensor& tensor) {
        out << '(' << tensor.sizes() << tensor.strides() << static_cast<int>(tensor.scalar_type())
            << tensor.unsafeGetTensorImpl()->is_wrapped_number() << ')';
      });
      out << ']';
    } else if (!argument.isGenerator()) {
      out << argument << ',';
    }
  }
  return out.str();
}

inline Shapes infer(const c10::OperatorHandle& op, Stack arguments) {
  Shapes shapes;
  const auto& schema = op.schema();
  for (auto& argument : arguments) {
    if (argument.isGenerator()) argument = c10::IValue();
    if (argument.isDevice()) argument = c10::Device(c10::kMeta);
    map_tensors(argument, meta_of);
  }
  const Stack inputs = arguments;
  try {
    op.callBoxed(&arguments);
  } catch (const std::exception&) {
    return shapes;  // no meta kernel
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const bool is_single = is_written(schema.arguments()[i]) && inputs[i].isTensor();
    shapes.written.push_back(is_single ? inputs[i].toTensor().sizes().vec() : std::vector<int64_t>());
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto& value = arguments[arguments.size() - schema.returns().size() + i];
    std::vector<Shape> returned;
    if (value.isTensor()) {
      returned.push_back(shape_of(value.toTensor()));
    } else if (value.isTensorList()) {
      for (const at::Tensor& one : value.toTensorVector()) returned.push_back(shape_of(one));
    } else if (!value.isNone()) {
      return shapes;
    }
    shapes.is_list.push_back(value.isTensorList());
    shapes.returned.push_back(std::move(returned));
  }
  shapes.is_known = true;
  return shapes;
}

inline const Shapes& shapes_of(const c10::OperatorHandle& op, const Stack& arguments) {
  static std::mutex& lock = *new std::mutex;
  static auto& cache = *new std::unordered_map<std::string, Shapes>;
  const auto key = signature(op, arguments);
  {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = cache.find(key);
    if (found != cache.end()) return found->second;
  }
  auto shapes = infer(op, arguments);  // outside of the lock: a meta kernel in Python takes the GIL
  const std::lock_guard<std::mutex> guard(lock);
  return cache.emplace(key, std::move(shapes)).first->second;
}

inline std::atomic<uint64_t> num_at_launch{0};  // kernels without a meta kernel: run at their launch
inline std::set<std::string>& names_at_launch = *new std::set<std::string>;

// Draw at the launch, as CUDA takes its offset then: the order of launches says which numbers come.
inline std::optional<uint64_t> draw_seed(const c10::OperatorHandle& op, Stack& arguments) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  at::Generator drawing = default_generator(-1);
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (is_here(tensor)) drawing = default_generator(tensor.device().index());
    });
  }
  for (auto& argument : arguments) {
    if (argument.isGenerator()) {
      drawing = argument.toGenerator();
      argument = c10::IValue();
    }
  }
  if (drawing.device().type() == kDevice) drawing = static_cast<Generator*>(drawing.unsafeGetGeneratorImpl())->inner;
  auto* generator = at::check_generator<at::CPUGeneratorImpl>(drawing);
  const std::lock_guard<std::mutex> guard(generator->mutex_);
  return generator->random64();
}

inline void run_seeded(const std::optional<uint64_t>& seed, const c10::OperatorHandle& op, Stack* arguments) {
  if (!seed.has_value()) return op.callBoxed(arguments);
  static std::mutex& lock = *new std::mutex;  // the CPU's generator is one for all threads
  const std::lock_guard<std::mutex> guard(lock);
  auto cpu = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  const auto saved = cpu.get_state();
  cpu.set_current_seed(*seed);
  op.callBoxed(arguments);
  cpu.set_state(saved);
}

// Queue an op that torch would hand to the device.
inline void launch(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(num_arguments), stack->end());
  torch::jit::drop(*stack, num_arguments);
  c10::Device device(kDevice, current_device);
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (is_here(tensor)) device = tensor.device();
    });
  }
  const c10::DeviceGuard on_device(device);
  const auto seed = draw_seed(op, arguments);
  Shapes shapes;
  {
    const at::ThreadLocalStateGuard plain(Queues::pristine());
    const c10::AutoGradMode no_mode(false);
    if (!op.hasTag(at::Tag::dynamic_output_shape)) shapes = shapes_of(op, arguments);
  }
  // Outputs of another size than what is given
  for (size_t i = 0; shapes.is_known && i < num_arguments; ++i) {
    if (is_written(schema.arguments()[i]) && arguments[i].isTensor()) {
      const auto& written = arguments[i].toTensor();
      if (is_here(written) && written.sizes() != c10::IntArrayRef(shapes.written[i])) {
        at::native::resize_(written, shapes.written[i]);
      }
    }
  }
  std::vector<Range> ranges;
  Stack later = arguments;
  for (size_t i = 0; i < num_arguments; ++i) {
    const bool writes = writes_to(op, schema.arguments()[i], arguments);
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (is_here(tensor)) ranges.push_back(range_of(tensor, writes));
    });
    if (later[i].isDevice()) later[i] = c10::Device(c10::kCPU);
    map_tensors(later[i], captured);
  }
  const auto key = current_key(device.index());
  const bool grad_mode = c10::GradMode::is_enabled();
  const auto run = [op, seed, grad_mode](Stack values) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::AutoGradMode mode(grad_mode);
    give_statistics_of_cpu(op, values);
    run_seeded(seed, op, &values);
    return values;
  };
  Stack results;
  if (shapes.is_known) {
    std::vector<std::vector<at::Tensor>> targets;
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      targets.emplace_back();
      const auto* alias = schema.returns()[i].alias_info();
      if (alias != nullptr) {  // an argument that was written is returned
        for (size_t j = 0; j < num_arguments; ++j) {
          const auto* other = schema.arguments()[j].alias_info();
          if (other != nullptr && *other == *alias) results.push_back(arguments[j]);
        }
        continue;
      }
      c10::List<at::Tensor> made;
      for (const auto& shape : shapes.returned[i]) {
        at::Tensor tensor;
        if (shape.dtype.has_value()) {
          tensor = at::detail::empty_strided_generic(
              shape.sizes, shape.strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), *shape.dtype);
          ranges.push_back(range_of(tensor, true));
        }
        made.push_back(tensor);
        targets.back().push_back(captured(tensor));
      }
      if (shapes.is_list[i]) {
        results.emplace_back(std::move(made));
      } else {
        results.push_back(shapes.returned[i].empty() ? c10::IValue() : c10::IValue(made.get(0)));
      }
    }
    const Lock guard(queues.lock);
    queues.queue(key, schema.name(), ranges, [run, later, targets] {
      const Stack values = run(later);
      for (size_t i = 0; i < targets.size(); ++i) {
        const auto& value = values[values.size() - targets.size() + i];
        if (targets[i].empty()) continue;
        const auto made = value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{value.toTensor()};
        for (size_t j = 0; j < targets[i].size(); ++j) {
          if (!targets[i][j].defined()) continue;
          if (made[j].numel() == 0) {  // statistics of a batch norm that does not train: the CPU has none, others have
            targets[i][j].zero_();
          } else {
            targets[i][j].copy_(made[j]);
          }
        }
      }
    });
  } else {
    Stack values;
    {
      const Lock guard(queues.lock);
      ++num_at_launch;
      names_at_launch.insert(schema.name());
      queues.run_until_empty(key);  // the checker is not told: it sees a kernel that is queued
      const c10::impl::ForceDispatchKeyGuard plain(Queues::pristine_keys());
      const NoModes no_modes;
      values = run(later);
    }
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      auto value = values[values.size() - schema.returns().size() + i];
      const auto* alias = schema.returns()[i].alias_info();
      bool is_argument = false;
      for (size_t j = 0; alias != nullptr && j < num_arguments; ++j) {
        const auto* other = schema.arguments()[j].alias_info();
        if (other != nullptr && *other == *alias) {
          value = arguments[j];
          is_argument = true;
        }
      }
      if (!is_argument) {
        map_tensors(value, [&](const at::Tensor& tensor) {
          at::Tensor made = at::detail::empty_strided_generic(
              tensor.sizes(), tensor.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
              tensor.scalar_type());
          const Lock guard(queues.lock);
          queues.run_until_empty(key);
          on_cpu(made).copy_(tensor);
          ranges.push_back(range_of(made, true));
          return made;
        });
      }
      results.push_back(value);
    }
    const Lock guard(queues.lock);
    queues.queue(key, schema.name(), ranges, [] {});
    // Sizes that depend on data: the host waits for them.
    if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
      queues.wait_for_stream(key);
    }
  }
  for (auto& result : results) stack->push_back(std::move(result));
}

// A copy, in the current stream of its source's device, or of its target's where the source is the host's.
inline void queue_copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto device = is_here(source) ? source.device() : target.device();
  const auto key = current_key(device.index());
  std::vector<Range> ranges;
  // Aliases of host memory, too: an entry that held a tensor of Python would need the GIL when it dies.
  const c10::InferenceMode plain(false);
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor from = alias_on_cpu(source);
  const at::Tensor to = alias_on_cpu(target);
  const auto read = range_of(source, false), written = range_of(target, true);
  const Lock guard(queues.lock);
  bool waits = !(is_here(source) && is_here(target)) && !non_blocking;
  if (is_here(source) || (non_blocking && queues.checker.covers(read.start, read.stop))) {
    ranges.push_back(read);
  } else {  // memory that is not pinned is read at the call
    if (queues.checker.covers(read.start, read.stop)) queues.on_host(read, "a copy from host memory");
    from = source.clone();
  }
  if (is_here(target) || queues.checker.covers(written.start, written.stop)) {
    ranges.push_back(written);
  } else {
    waits = true;  // and written before the call returns
  }
  const bool is_between = is_here(source) && is_here(target) && source.device() != target.device();
  const auto other = is_between ? current_key(target.device().index()) : key;
  if (is_between) queues.follow(key, queues.mark(other));
  queues.queue(key, "a copy", ranges, [from, to] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  if (is_between) queues.follow(other, queues.mark(key));
  if (waits) queues.wait_for_stream(key);
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  queue_copy(source, target, non_blocking);
  return target;  // without the lock: another reference to a tensor of Python may need the GIL
}

inline at::Scalar local_scalar(const at::Tensor& tensor) {
  at::Tensor made = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
  queue_copy(tensor, made, false);
  const at::AutoDispatchBelowADInplaceOrView below;
  return made.item();
}

}  // namespace racecheck
