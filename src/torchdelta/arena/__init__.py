"""Where the allocations of a session go: a caching allocator, or planned addresses for steps that repeat."""
