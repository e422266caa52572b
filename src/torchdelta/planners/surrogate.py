"""Bayesian optimisation in a few dimensions: a Gaussian process and its upper confidence bound, in numpy.

Small on purpose: a squared-exponential kernel of fixed length, values standardised, the bound maximised over a fixed
set of points. Deterministic: the points come from a seeded generator.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["maximize"]

_KAPPA = 5.0
_STEPS = 20
_NUM_POINTS = 512
_LENGTH = 0.7
_NOISE = 1e-6

Array = NDArray[np.float64]


def maximize(value: Callable[[Array], float], *, dimensions: int) -> None:
    """Try the unit vectors, then twenty more points of [-1, 1]^n, each where the upper confidence bound is highest.

    What was tried and found is the caller's to keep.

    Args:
        value: What to make large; finite.
        dimensions: Number of coordinates.
    """
    points = np.random.default_rng(0).uniform(-1, 1, size=(_NUM_POINTS, dimensions))
    tried = np.eye(dimensions)
    values = np.array([value(point) for point in tried])
    for _ in range(_STEPS):
        point = points[int(np.argmax(_upper_bound(tried, values, points)))]
        tried = np.vstack([tried, point])
        values = np.append(values, value(point))


def _upper_bound(tried: Array, values: Array, points: Array) -> Array:
    deviation = values.std()
    scaled = (values - values.mean()) / (deviation if deviation > 0 else 1.0)
    inverse = np.linalg.inv(_kernel(tried, tried) + _NOISE * np.eye(len(tried)))
    across = _kernel(points, tried)
    mean = across @ inverse @ scaled
    variance = np.maximum(1.0 - np.einsum("ij,jk,ik->i", across, inverse, across), 0.0)
    return mean + _KAPPA * np.sqrt(variance)


def _kernel(left: Array, right: Array) -> Array:
    distance = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
    return np.exp(-distance / (2 * _LENGTH**2))
