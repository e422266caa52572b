// What the gate knows an op by: a hash of its identity, and of the shapes, dtypes and integers of its arguments, and of
// which of them need gradients: a parameter that becomes trainable changes nothing else of a forward.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <functional>

namespace op_hash {

inline uint64_t mixed(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9E3779B97F4A7C15ull + (hash >> 29); }

inline uint64_t with_tensor(uint64_t hash, const at::Tensor& tensor) {
  if (!tensor.defined()) return mixed(hash, 1);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  hash = mixed(hash, static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype())));
  hash = mixed(hash, static_cast<uint64_t>(impl->device_type()));
  if (impl->has_symbolic_sizes_strides() || impl->layout() != c10::kStrided || tensor.is_nested() ||
      impl->key_set().has(c10::DispatchKey::Python)) {
    return mixed(hash, 2);
  }
  hash = mixed(hash, static_cast<uint64_t>(impl->device().index() + 1));
  for (const int64_t size : impl->sizes()) hash = mixed(hash, static_cast<uint64_t>(size) + 3);
  hash = mixed(hash, static_cast<uint64_t>(impl->requires_grad()));
  return mixed(hash, static_cast<uint64_t>(impl->is_contiguous()));
}

inline uint64_t with_value(uint64_t hash, const c10::IValue& value) {
  if (value.isTensor()) return with_tensor(hash, value.toTensor());
  if (value.isInt()) return mixed(hash, static_cast<uint64_t>(value.toInt()));
  if (value.isBool()) return mixed(hash, value.toBool() ? 5 : 7);
  if (value.isNone()) return mixed(hash, 11);
  if (value.isIntList()) {
    for (const int64_t item : value.toIntVector()) hash = mixed(hash, static_cast<uint64_t>(item));
    return mixed(hash, 13);
  }
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) hash = with_value(hash, item);
    return mixed(hash, 17);
  }
  return mixed(hash, 19);  // numbers that may change from step to step, names, generators
}

inline uint64_t hash_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t num_arguments = op.schema().arguments().size();
  uint64_t hash = std::hash<c10::OperatorHandle>{}(op);
  for (size_t index = stack.size() - num_arguments; index < stack.size(); ++index) hash = with_value(hash, stack[index]);
  return hash;
}

}  // namespace op_hash
