"""Where each buffer lives: offsets for the lives of one step, their footprint, and how far it is from the least."""
