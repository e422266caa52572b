"""A linear program, put together row by row and solved by HiGHS (extra `solver`).

HiGHS is deterministic on one thread, and is given no time limit, so that the same trace has the same bound everywhere.
"""

import importlib
import math
from typing import Any

import msgspec

from torchdelta.errors import PlanError

__all__ = ["LinearProgram", "Solution"]


_LARGE = 5000
"""From so many variables on the interior point is faster: 3 s on a GPT2-Large, where the simplex method takes 60."""


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """An optimal solution.

    Attributes:
        objective: Its cost; for a MILP the proved lower bound of the cost.
        values: Value of each variable.
    """

    objective: float
    values: list[float]


class LinearProgram:
    """Variables from 0 up, rows of linear inequalities, a cost to make least. Mutable while it is put together."""

    def __init__(self) -> None:
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._integral: list[bool] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._values: list[float] = []

    def variable(self, upper: float, *, cost: float = 0.0, integral: bool = False) -> int:
        """Add a variable between 0 and `upper`, and return its number."""
        self._upper.append(upper)
        self._cost.append(cost)
        self._integral.append(integral)
        return len(self._upper) - 1

    def cost(self, variable: int, cost: float) -> None:
        """Set what one unit of a variable costs."""
        self._cost[variable] = cost

    def row(self, terms: list[tuple[int, float]], *, lower: float = -math.inf, upper: float = math.inf) -> int:
        """Add `lower <= sum of factor x variable <= upper`, and return its number; a variable may occur twice."""
        merged: dict[int, float] = {}
        for column, factor in terms:
            merged[column] = merged.get(column, 0.0) + factor
        self._columns.extend(merged)
        self._values.extend(merged.values())
        self._starts.append(len(self._columns))
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        return len(self._row_lower) - 1

    def solve(self, *, integral: bool = False) -> Solution | None:
        """Return an optimal solution, None if there is none.

        Args:
            integral: Hold the integral variables to whole numbers (branch and bound, no gap left).

        Raises:
            PlanError: highspy is not installed, or HiGHS gave up.
        """
        highspy = _highspy()
        options: dict[str, Any] = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0}
        if integral:
            # HiGHS 1.15.1 loses the best solution of some programs with slow links, with its presolve and some seeds.
            options["presolve"] = "off"
        if not integral and len(self._upper) > _LARGE:
            options["solver"] = "ipm"  # ended by a crossover to a vertex
        solver = self._solver(options, integral=integral)
        solver.run()
        status = solver.getModelStatus()
        if status not in {highspy.HighsModelStatus.kOptimal, *_infeasible(highspy)}:
            # It stopped short of a proof, which the plain simplex method (and branch and bound) then gives.
            solver.clearSolver()
            solver.setOptionValue("solver", "simplex")
            solver.setOptionValue("presolve", "off")
            solver.run()
            status = solver.getModelStatus()
        if status in _infeasible(highspy):
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise PlanError(f"HiGHS found no bound: {solver.modelStatusToString(status)}")
        info = solver.getInfo()
        objective = info.mip_dual_bound if integral else info.objective_function_value
        return Solution(objective=float(objective), values=[float(v) for v in solver.getSolution().col_value])

    def _solver(self, options: dict[str, Any], *, integral: bool = False) -> Any:
        """Return HiGHS with this program in it, on one thread."""
        highspy, numpy = _highspy(), importlib.import_module("numpy")
        solver = highspy.Highs()
        for option, value in {"output_flag": False, "threads": 1, **options}.items():
            solver.setOptionValue(option, value)
        problem = highspy.HighsLp()
        problem.num_col_, problem.num_row_ = len(self._upper), len(self._row_lower)
        problem.col_cost_ = numpy.array(self._cost)
        problem.col_lower_ = numpy.zeros(len(self._upper))
        problem.col_upper_ = numpy.array(self._upper)
        problem.row_lower_, problem.row_upper_ = numpy.array(self._row_lower), numpy.array(self._row_upper)
        problem.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        problem.a_matrix_.start_ = numpy.array(self._starts, dtype=numpy.int32)
        problem.a_matrix_.index_ = numpy.array(self._columns, dtype=numpy.int32)
        problem.a_matrix_.value_ = numpy.array(self._values)
        if integral:
            kinds = highspy.HighsVarType
            problem.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self._integral]
        solver.passModel(problem)
        return solver


def _highspy() -> Any:
    try:
        importlib.import_module("numpy")
        return importlib.import_module("highspy")
    except ModuleNotFoundError as error:
        raise PlanError(f"a bound needs {error.name}: pip install 'torchdelta[plan,solver]'") from error


def _infeasible(highspy: Any) -> set[Any]:
    return {highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible}
