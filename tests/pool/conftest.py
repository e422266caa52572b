"""Solvers need numba; without it there is nothing to test here."""

import pytest

pytest.importorskip("numba")
