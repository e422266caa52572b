// AboveAutograd: lets autograd's kernels act for a while, in the middle of an op, which runs below them.
//
// What Python does there makes aliases that share a version counter with their tensor, which only autograd's kernels do.
// Dispatch modes may come onto the stack or leave it meanwhile, so the set of keys is not restored as a whole.
#pragma once
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstddef>

class AboveAutograd {
 public:
  AboveAutograd() {
    for (size_t index = 0; index < keys.size(); ++index) {
      was_excluded[index] = c10::impl::tls_is_dispatch_key_excluded(keys[index]);
      c10::impl::tls_set_dispatch_key_excluded(keys[index], false);
    }
  }
  ~AboveAutograd() {
    for (size_t index = 0; index < keys.size(); ++index) {
      c10::impl::tls_set_dispatch_key_excluded(keys[index], was_excluded[index]);
    }
  }
  AboveAutograd(const AboveAutograd&) = delete;
  AboveAutograd& operator=(const AboveAutograd&) = delete;

 private:
  static constexpr std::array<c10::DispatchKey, 4> keys = {
      c10::DispatchKey::AutogradFunctionality, c10::DispatchKey::AutogradOther, c10::DispatchKey::AutogradNestedTensor,
      c10::DispatchKey::ADInplaceOrView};
  std::array<bool, keys.size()> was_excluded{};
};
