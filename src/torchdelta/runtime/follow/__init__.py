"""Carries a plan out: from the traced step on, tensors leave and return at the moments of a program."""
