"""Who leaves the device, when, and how: the plan, its file, and what must hold of it."""
