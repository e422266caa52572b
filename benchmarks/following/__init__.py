"""Followed plans beside the reactive policy, recording alone, torch's checkpointing and offloading: time and peak.

For each model, rounds in which plain and all others take turns (see `turns`), each round in a process of its own. Each
measured step alternates with a plain one in a second process (see `plain_process`). The budgets are shares of the plain
peak, and the peak that each peer was measured with. Checked: followed steps stay inside the budget, cost no more than
reactive ones and than each peer at its own peak, and take what was predicted.
"""

from benchmarks.following.command import add_arguments, run

__all__ = ["add_arguments", "run"]
