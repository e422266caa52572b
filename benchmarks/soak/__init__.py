"""A night in half an hour: models trained in turns under pressing budgets, with faults, against a plain twin.

Two processes train the same models on the same batches, one plainly and one inside budgets: every policy and tier in
turn, several shares of the peak, sequence lengths and batch sizes mixed, gradients accumulated, evaluation between
steps. Faults come at random, from a seed: exceptions and interrupts in forward, in backward and in hooks, a backward
that is never called, graphs that live on, optimizers that fail, batches that cannot fit, memory that runs out inside an
op, copies that fail. The twin suffers those that a user could cause, too. After each step both must have the same bits,
the budget must have held, and from the second round on nothing may grow.
"""

from benchmarks.soak.command import add_arguments, run

__all__ = ["add_arguments", "run"]
