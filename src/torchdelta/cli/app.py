"""Builds the typer application from the commands."""

import logging
import os
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import torchdelta
from torchdelta.cli.demo import demo
from torchdelta.cli.env import env
from torchdelta.cli.fit import fit
from torchdelta.cli.plan import plan
from torchdelta.cli.pool import pool
from torchdelta.cli.probe import probe
from torchdelta.cli.run import run
from torchdelta.cli.simulate import simulate
from torchdelta.cli.step import EXIT_FAILED, EXIT_USAGE, fail, prefix
from torchdelta.cli.trace import trace
from torchdelta.names import unknown_name

__all__ = ["make_app"]

_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _OneLineGroup(TyperGroup):
    """Commands whose usage errors, too, are one line: typer would draw a box of six."""

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run a command, and exit with its code."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **options)
        try:
            code = super().main(*args, standalone_mode=False, **options)
        except typer.Abort:
            code = EXIT_FAILED
        # typer's own usage errors have no public class of their own; no arguments at all show the help.
        except Exception as error:
            tell = getattr(error, "format_message", None)
            if tell is None or isinstance(error, typer.Exit):
                raise
            message, context = tell(), getattr(error, "ctx", None)
            if len(message.splitlines()) > 1:
                typer.echo(message, err=True)
            else:
                command = "torchdelta" if context is None else context.command_path
                message = f"{message[:1].lower()}{message[1:].rstrip('.')}"
                typer.echo(f"{prefix()}: {message} (see `{command} --help`)", err=True)
            code = EXIT_USAGE
        sys.exit(code or 0)


def make_app() -> typer.Typer:
    """Build the typer application."""
    # `run` shows a script's exceptions as Python does, and our own errors are one line: typer must add nothing.
    app = typer.Typer(
        name="torchdelta",
        cls=_OneLineGroup,
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
        typer.echo(f"torchdelta {torchdelta.__version__}")
        raise typer.Exit


def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    level = os.environ.get("TORCHDELTA_LOG_LEVEL", "")
    if not level:
        return
    if level.upper() not in _LEVELS:
        fail(f"TORCHDELTA_LOG_LEVEL: {unknown_name('level', level, _LEVELS)}", EXIT_USAGE)
    # Only the library's own logger: the root logger is left to the script.
    logger = logging.getLogger("torchdelta")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
