// The tape as gate.cpp and saved_hooks.cpp use it; tape.cpp implements it. They are three modules, and only virtual
// functions are called from one in another.
#pragma once
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace tape {

constexpr const char* kCapsule = "torchdelta.tape";
constexpr const char* kSaveCapsule = "torchdelta.save";

// How an op of a sequence is recorded: a sum of these; 0: not at all. Without a tape, all others are recorded in Python.
enum Recorded : int64_t {
  kInPython = 1,
  kOnTape = 2,
  kHasStatistics = 4,  // a batch norm
  kWrites = 8,         // it writes its first argument
  kOverwrites = 16,    // the same, all of it, without reading it
  kIsRandom = 32,
  kUnseen = 64,  // not at all where there is a tape: that is told of the writes of all ops
  kIsConstant = 128,
};

// Return whether a tensor is a plain one: all that matters of it are its storage, sizes, strides and dtype.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet odd(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::FuncTorchBatched, DispatchKey::Functionalize, DispatchKey::ZeroTensor, DispatchKey::Conjugate,
       DispatchKey::Negative, DispatchKey::NestedTensor, DispatchKey::Quantized});
  return tensor.defined() && !tensor.is_meta() && tensor.layout() == c10::kStrided && !tensor.is_inference() &&
         !tensor.key_set().has_any(odd);
}

constexpr size_t kFirstStatistics = 3;  // of a recorded batch norm
constexpr size_t kNoStatistics = SIZE_MAX;

// Return the position of the running mean, with the running variance behind it, that an op writes although its schema
// does not say so (aten/batch_norm.py), or `kNoStatistics`.
inline size_t first_statistics(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::native_batch_norm" || name == "aten::cudnn_batch_norm" || name == "aten::miopen_batch_norm" ||
      name == "aten::batch_norm_gather_stats" || name == "aten::batch_norm_gather_stats_with_counts") {
    return 3;
  }
  return name == "aten::batch_norm_update_stats" ? 1 : kNoStatistics;
}

// Return whether an op is a collective, or prepares for one. Their schemas do not say what they write
// (aten/collectives.py), so here each may write all its arguments: that costs copies at most.
inline bool is_collective(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name.rfind("c10d::", 0) == 0 || name.rfind("fsdp::", 0) == 0 || name == "_c10d_functional::irecv" ||
         name == "_c10d_functional::batch_p2p_ops";
}

inline bool writes_arguments(const c10::OperatorHandle& op) {
  return op.schema().is_mutable() || first_statistics(op) != kNoStatistics || is_collective(op);
}

// Call a function with a tensor, with a list of tensors, or with each list in a list of lists.
template <typename Function>
void for_each_list(const c10::IValue& value, const Function& function) {
  if (value.isList() && !value.isTensorList()) {
    for (const c10::IValue& inner : value.toListRef()) for_each_list(inner, function);
  } else {
    function(value);
  }
}

// Call a function with a tensor, or with those that a sparse one consists of.
template <typename Function>
void for_each_part(const at::Tensor& tensor, const Function& function) {
  const c10::Layout layout = tensor.key_set().has(c10::DispatchKey::Python) ? c10::kStrided : tensor.layout();
  if (layout == c10::kSparse) {
    const auto* sparse = static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    function(sparse->values());
    function(sparse->indices());
  } else if (layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr ||
             layout == c10::kSparseBsc) {
    const auto* sparse = static_cast<const at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
    for (const at::Tensor& part : {sparse->values(), sparse->compressed_indices(), sparse->plain_indices()}) {
      function(part);
    }
  } else {
    function(tensor);
  }
}

// Call a function with each argument on the stack that an op writes, or may write.
template <typename Function>
void for_each_written(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const Function& function) {
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack.size() - arguments.size();
  const size_t statistics = first_statistics(op);
  const bool writes_all = is_collective(op);
  for (size_t index = 0; index < arguments.size(); ++index) {
    const c10::AliasInfo* alias = arguments[index].alias_info();
    const bool is_statistics = statistics != kNoStatistics && (index == statistics || index == statistics + 1);
    if (writes_all) {
      for_each_list(stack[begin + index], function);
    } else if (is_statistics || (alias != nullptr && alias->isWrite())) {
      function(stack[begin + index]);
    }
  }
}

// What a handle holds of a saved tensor whose content may be dropped.
class Save : public c10::intrusive_ptr_target {
 public:
  // Return the number of the saved tensor in its step.
  virtual int64_t number() const = 0;

  // Return whether its content may be dropped; else the handle holds the tensor.
  virtual bool has_content() const = 0;

  // Return whether the tensor has not been written since it was saved.
  virtual bool is_unmodified() const = 0;

  // Return the version of the tensor when it was saved.
  virtual uint32_t version() const = 0;

  // Return a tensor of the same sizes, dtype and version counter: with its content where that is resident; else without
  // memory, if `or_empty`, or an undefined one.
  virtual at::Tensor resident(bool or_empty) const = 0;
};

using SavePtr = c10::intrusive_ptr<Save>;

class Tape {
 public:
  virtual ~Tape() = default;

  // Run an op whose arguments are on the stack, and record it. Return false if it cannot be recorded, and has not run.
  virtual bool record(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack,
                      int64_t need_bytes, int64_t recorded) = 0;

  // Keep what replays read, and what saved tensors show, of the storages that an op is about to write.
  virtual void before_write(const c10::OperatorHandle& op, const torch::jit::Stack& stack) = 0;

  // Save a tensor, and drop what leaves at this number. `is_kept`: its content stays.
  virtual SavePtr save(const at::Tensor& tensor, int64_t number, bool is_kept) = 0;

  // Replay what is due before a saved tensor is returned.
  virtual void before_unpack(const SavePtr& save) = 0;

  // Return a saved tensor. Undefined: all that was recorded has been handed over to Python meanwhile.
  virtual at::Tensor unpack(const SavePtr& save) = 0;
};

}  // namespace tape
