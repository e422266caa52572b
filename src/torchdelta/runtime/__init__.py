"""Carries a plan out on a live training loop: records ops, moves or drops saved buffers, and brings them back."""
