"""The marker `fits` in runs of pytest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchdelta.machine.cache import cache_directory

pytest_plugins = ["pytester"]

OPTIONS = ("-p", "no:torchdelta", "-p", "torchdelta.integrations.pytest", "-p", "no:cacheprovider", "--strict-markers")
MODELS = """
    import pytest
    import torch
    from torch import nn

    def mlp(batch_size):
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.randn(batch_size, 256)
"""

CACHE = cache_directory()  # with compiled code; pytester moves the home directory


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a file of tests in a process of its own: what torch registers can be registered only once."""
    monkeypatch.setenv("TORCHDELTA_CACHE_DIR", str(CACHE))

    def run(tests: str, *options: str):
        pytester.makepyfile(MODELS + tests)
        return pytester.runpytest_subprocess(*OPTIONS, *options)

    return run


def test_steps_that_fit_pass_and_others_fail_with_the_reason(run, pytester):
    """Parameters, fixtures, methods, several markers and marks such as xfail work as in other tests.

    Sizes go into reports, as properties of the tests.
    """
    done = run("""
    @pytest.mark.fits("1GiB", machine="rtx4090")
    def test_small():
        return mlp(4)

    @pytest.mark.fits("32MiB", machine="rtx4090")
    @pytest.mark.parametrize("batch_size", [4, 4096])
    def test_batches(batch_size):
        return mlp(batch_size)

    @pytest.fixture
    def batch_size():
        return 4096

    class TestMethods:
        @pytest.mark.fits("32MiB", machine="rtx4090")
        @pytest.mark.xfail(strict=True)
        def test_method(self, batch_size):
            return mlp(batch_size)

    @pytest.mark.fits("1MiB", machine="rtx4090")
    @pytest.mark.fits(machine="t4")
    def test_two_markers():
        return mlp(4)

    def test_without_the_marker():
        assert True
    """, "--junitxml=report.xml")  # fmt: skip
    done.assert_outcomes(passed=3, failed=2, xfailed=1)
    done.stdout.fnmatch_lines(
        [
            "the step outgrows 32.00 MiB on rtx4090: its peak is *MiB too much",
            "the peak is set by op * of *, aten.*, and",
            "*MiB  activation, made by aten.*",
            "the least budget is * MiB*",
            "the step outgrows 1.00 MiB on rtx4090: *",
        ]
    )
    done.stdout.no_fnmatch_line("*Traceback*")
    report = (pytester.path / "report.xml").read_text()
    assert 'name="limit_bytes" value="1073741824"' in report
    assert 'name="peak_bytes"' in report


def test_a_wrong_test_fails_with_one_line(run):
    """Whether the marker is wrong, or what the function does."""
    done = run("""
    @pytest.mark.fits("1GiB")
    def test_no_machine():
        return mlp(4)

    @pytest.mark.fits(machine="rtx409")
    def test_unknown_machine():
        return mlp(4)

    @pytest.mark.fits(machine="t4", size_gb=3)
    def test_unknown_option():
        return mlp(4)

    @pytest.mark.fits(machine="t4", optimizer="adam")
    def test_unknown_optimizer():
        return mlp(4)

    @pytest.mark.fits(machine="t4", optimizer=None)
    def test_no_optimizer():
        return mlp(4)

    @pytest.mark.fits(machine="t4", optimizer=["sgd"])
    def test_list_of_optimizers():
        return mlp(4)

    @pytest.mark.fits(machine="t4")
    def test_nothing():
        pass

    @pytest.mark.fits(machine="t4")
    def test_error():
        return 1 / 0

    @pytest.mark.fits(machine="t4")
    async def test_coroutine():
        return mlp(4)
    """)
    done.assert_outcomes(failed=9)
    done.stdout.fnmatch_lines(
        [
            "fits needs a machine by its name in the catalog, such as machine=*",
            "*did you mean*rtx4090*",
            "*size_gb*: use fits(size=*",
            "*'adam'*adamw*",
            "unknown optimizer None: use none, sgd, sgd-momentum or adamw",
            "unknown optimizer ['sgd']: use none, sgd, sgd-momentum or adamw",
            "*test_nothing returned NoneType: it must return*",
            "*test_error*ZeroDivisionError*",
            "*returned coroutine: it must*",
        ]
    )
    done.stdout.no_fnmatch_line("*another exception occurred*")
    done.stdout.no_fnmatch_line("*Traceback*")


def test_the_marker_on_a_unittest_is_refused(run):
    """There it would do nothing."""
    done = run("""
    import unittest

    class TestCase(unittest.TestCase):
        @pytest.mark.fits(machine="t4")
        def test_it(self):
            return mlp(4)
    """)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: *test_it: the marker fits is for functions and methods, not for *TestCase"])


def test_runs_without_the_marker_load_no_torch(pytester):
    """The plugin is loaded by every run in an environment that has torchdelta."""
    pytester.makepyfile("def test_it():\n    import sys\n    assert 'torch' not in sys.modules\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, "-q"],
        cwd=pytester.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
