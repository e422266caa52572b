"""Records what torch does: ops, saved tensors, backward, compiled regions, transforms."""
