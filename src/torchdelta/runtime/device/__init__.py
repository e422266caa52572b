"""What differs between devices: allocator, streams, timers."""
