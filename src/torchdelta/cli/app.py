"""Builds the typer application from the commands."""

import logging
import os
from typing import Annotated, Final

import typer

import torchdelta
from torchdelta.cli.demo import demo
from torchdelta.cli.env import env
from torchdelta.cli.errors import OneLineGroup, one_of, print_result
from torchdelta.cli.fit import fit
from torchdelta.cli.plan import plan
from torchdelta.cli.pool import pool
from torchdelta.cli.probe import probe
from torchdelta.cli.run import run
from torchdelta.cli.simulate import simulate
from torchdelta.cli.trace import trace

__all__ = ["make_app"]

_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def make_app() -> typer.Typer:
    """Build the typer application."""
    # `run` shows a script's exceptions as Python does, and our own errors are one line: typer must add nothing.
    app = typer.Typer(
        name="torchdelta",
        cls=OneLineGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help=_HELP,
    )
    app.callback()(_common)
    # Arguments after the first non-option (the script) belong to the script.
    app.command(context_settings={"allow_interspersed_args": False})(run)
    app.command()(demo)
    app.command()(trace)
    app.command()(probe)
    app.command()(plan)
    app.command()(simulate)
    app.command()(fit)
    app.command()(pool)
    app.command()(env)
    return app


_HELP: Final = "Train any PyTorch model inside a byte budget, with bit-equal results."


def _show_version(wanted: bool) -> None:
    if wanted:
        print_result(f"torchdelta {torchdelta.__version__}")
        raise typer.Exit


def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    level = os.environ.get("TORCHDELTA_LOG_LEVEL", "")
    if not level:
        return
    level = one_of("TORCHDELTA_LOG_LEVEL", level.upper(), _LEVELS)
    # Only the library's own logger: the root logger is left to the script.
    logger = logging.getLogger("torchdelta")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
