"""The simulator against real steps on CPU: the plain peak, and the times of swap-all and of block checkpointing.

One process a model, on one core, in which plain, recorded, kept, swapped and checkpointed steps and copies through the
memory tier take turns. What the simulator is given is measured in the same turns: each op's time (median over the
recorded plain steps), the memory tier's rates on the sizes that swap-all moves, and what a step takes beside its ops
(the engine, the runtime, freeing), spread over them, from steps whose forced decisions keep everything. Nothing is
fitted to the steps that it is held against.

Times are processor time: on one core it is what the wall shows of a machine that does nothing else, and it counts the
copies of the tier's thread, which is what the simulator's option `synchronous` means. The wall's stand beside them.
"""

from benchmarks.fidelity.command import add_arguments, run

__all__ = ["add_arguments", "run"]
