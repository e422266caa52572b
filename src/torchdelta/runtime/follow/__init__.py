"""Carries a plan out: from the traced step on, saved tensors leave and return at the moments of a program."""
