"""A Sphinx extension: what a command's own help says, as a part of a page.

```{torchdelta-command} run
```

shows the usage, the text and the options of `torchdelta run`, as `torchdelta run --help` has them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer.main
from sphinx.util.docutils import SphinxDirective

from torchdelta.cli.app import make_app

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

__all__ = ["as_markdown", "command_names", "setup"]


def command_names() -> list[str]:
    """Return the names of all commands, in the order of `torchdelta --help`."""
    return list(_group().commands)


def as_markdown(name: str) -> str:
    """Return usage, text and options of a command as Markdown."""
    command = _group().commands[name]
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join(["torchdelta", name, "[OPTIONS]", *(_metavar(argument) for argument in arguments)])
    described = [_entry(f"`{_metavar(argument)}`", argument) for argument in arguments]
    described += [_entry(", ".join(f"`{text}`" for text in option.opts), option) for option in options]
    return "\n\n".join([f"```text\n{usage}\n```", _escaped(_dedented(command.help or "")), *described]) + "\n"


def _group() -> Any:
    return typer.main.get_command(make_app())


def _metavar(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]{}.")
    text = name if argument.nargs == 1 else f"{name}..."
    return text if argument.required else f"[{text}]"


def _entry(title: str, parameter: Any) -> str:
    notes: list[str] = []
    if parameter.required:
        notes.append("Required.")
    elif (
        parameter.param_type_name == "option" and parameter.default not in (None, False, "") and parameter.show_default
    ):
        notes.append(f"Default: `{parameter.default}`.")
    if getattr(parameter, "envvar", None):
        notes.append(f"Environment: `{parameter.envvar}`.")
    return "\n".join([title, f": {' '.join([_escaped(parameter.help or ''), *notes])}"])


def _dedented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _escaped(text: str) -> str:
    """Return text in which Markdown sees none but its code spans."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>\[\]{}])", r"\\\1", part) for part in parts)


class CommandDirective(SphinxDirective):
    """Puts a command's help into the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the parsed help."""
        return self.parse_text_to_nodes(as_markdown(self.arguments[0]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("torchdelta-command", CommandDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
