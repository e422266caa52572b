"""A linear program solved for one right-hand side after another, of which each solution bounds all others from below.

Duality: prices of the rows that are right for one right-hand side are feasible for every other, so what they say there
is no more than the least cost. One solution so gives an affine function below the least cost of all, a *cut* (Benders
1962). Its constant is put together here from the prices alone, so that what the solver rounds makes it lower, not wrong
(Neumaier and Shcherbina 2004).
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchdelta.bounds.linear_program import LinearProgram
from torchdelta.errors import PlanError

__all__ = ["Cut", "ParametricProgram"]

Floats = NDArray[np.float64]


class Cut(NamedTuple):
    """An affine function below the least cost.

    Attributes:
        constant: Its value where all parameters are 0.
        slopes: What it rises by with each parameter.
        values: The variables of the solution that it came from.
    """

    constant: float
    slopes: Floats
    values: Floats

    def at(self, points: Floats) -> Floats:
        """Return its value at each point: a row of parameters."""
        used = np.nonzero(self.slopes)[0]
        return self.constant + points[:, used] @ self.slopes[used]


class ParametricProgram(LinearProgram):
    """Rows that have one side each, which may rise or fall with parameters. All variables need a finite upper bound.

    No more rows or variables once it has been asked for a cut.
    """

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self._num_parameters = num_parameters
        self._moved: list[tuple[int, int, float]] = []  # row, parameter, factor
        self._ready: _Ready | None = None

    def move(self, row: int, parameter: int, factor: float) -> None:
        """Add `factor` times a parameter to the side that a row has."""
        self._moved.append((row, parameter, factor))

    def upper(self, variable: int) -> float:
        """Return the upper bound that a variable was made with."""
        return self._upper[variable]

    def hold(self, variable: int, lower: float, upper: float) -> None:
        """Hold a variable between two numbers from now on."""
        ready = self._start()
        ready.lower[variable], ready.upper[variable] = lower, upper
        ready.solver.changeColBounds(variable, lower, upper)

    def cut(self, parameters: Floats) -> Cut:
        """Return a cut that is as high as can be at these parameters.

        Raises:
            PlanError: highspy is not installed, or HiGHS gave up.
        """
        ready = self._start()
        sides = ready.sides + np.bincount(
            ready.rows, weights=ready.factors * parameters[ready.parameters], minlength=len(ready.sides)
        )
        lower = np.where(ready.is_lower, sides, -math.inf)
        upper = np.where(ready.is_lower, math.inf, sides)
        for row in ready.moving:
            ready.solver.changeRowBounds(int(row), float(lower[row]), float(upper[row]))
        ready.solver.run()
        solution = ready.solver.getSolution()
        prices = np.array(solution.row_dual)
        if len(prices) != len(ready.sides) or not np.isfinite(prices).all():
            raise PlanError(f"HiGHS found no bound: {ready.solver.modelStatusToString(ready.solver.getModelStatus())}")
        # A row that has a lower side is never better bought for less than nothing, and the other way round.
        prices = np.where(ready.is_lower, np.maximum(prices, 0.0), np.minimum(prices, 0.0))
        left = ready.costs - np.bincount(
            ready.columns, weights=ready.coefficients * prices[ready.row_of], minlength=len(ready.costs)
        )
        constant = float(prices @ ready.sides + np.minimum(left * ready.lower, left * ready.upper).sum())
        slopes = np.bincount(
            ready.parameters, weights=prices[ready.rows] * ready.factors, minlength=self._num_parameters
        ).astype(np.float64)
        return Cut(constant, slopes, np.array(solution.col_value))

    def _start(self) -> "_Ready":
        if self._ready is None:
            row_lower, row_upper = np.array(self._row_lower), np.array(self._row_upper)
            is_lower = np.isfinite(row_lower)
            if (is_lower == np.isfinite(row_upper)).any() or not np.isfinite(self._upper).all():
                raise PlanError("a parametric program needs rows with one side and variables with an upper bound")
            moved = np.array(self._moved or [(0, 0, 0.0)], np.float64).T
            starts = np.array(self._starts)
            self._ready = _Ready(
                solver=self._solver({"presolve": "off", "solver": "simplex"}),
                is_lower=is_lower,
                sides=np.where(is_lower, row_lower, row_upper),
                lower=np.zeros(len(self._upper)),
                upper=np.array(self._upper),
                costs=np.array(self._cost),
                rows=moved[0].astype(np.int64),
                parameters=moved[1].astype(np.int64),
                factors=moved[2],
                moving=np.unique(moved[0].astype(np.int64)),
                row_of=np.repeat(np.arange(len(starts) - 1), np.diff(starts)),
                columns=np.array(self._columns),
                coefficients=np.array(self._values),
            )
        return self._ready


class _Ready(NamedTuple):
    """The program as arrays, and the solver that goes on from its last solution. `lower` and `upper` are mutable."""

    solver: Any
    is_lower: NDArray[np.bool_]
    sides: Floats
    lower: Floats
    upper: Floats
    costs: Floats
    rows: NDArray[np.int64]
    parameters: NDArray[np.int64]
    factors: Floats
    moving: NDArray[np.int64]
    row_of: NDArray[np.int64]
    columns: NDArray[np.int64]
    coefficients: Floats
