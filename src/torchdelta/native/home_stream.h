// The stream on which a step's work is queued on an accelerator. What happens on others is not known.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

class HomeStream {
 public:
  explicit HomeStream(c10::Device device) : device_(device) {}

  // Make the current stream of this thread the home stream.
  void begin() {
    if (!device_.is_cpu()) home_ = current();
  }

  // Return whether the home stream is the current stream of this thread; always true on the CPU.
  bool is_current() const { return !home_.has_value() || current() == *home_; }

  // Run a function whose work is queued on the home stream. The current stream then waits for it.
  template <typename Function>
  void run_at_home(const Function& function) const {
    if (is_current()) {
      function();
      return;
    }
    const c10::Stream outside = current();
    {
      const c10::StreamGuard guard(*home_);
      function();
    }
    c10::Event queued(device_.type());
    queued.record(*home_);
    queued.block(outside);
  }

 private:
  c10::Stream current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

  c10::Device device_;
  std::optional<c10::Stream> home_;
};
