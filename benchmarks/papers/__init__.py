"""What every planner of the literature would do on the models of the papers: simulated on symbolic traces.

Four tables: overhead by budget and planner, beside the proved bound; the largest batch at a slowdown; what AutoSwap
saves without waiting; how long planning takes. Nothing runs on a GPU: op times are a roofline's, so all figures are
simulated, for all planners alike.
"""

from benchmarks.papers.command import add_arguments, run

__all__ = ["add_arguments", "run"]
