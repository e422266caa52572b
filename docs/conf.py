"""Settings of Sphinx: `make docs` builds the pages into build/docs, without a network, and fails at any warning."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

_DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(_DOCS / "_ext"), str(_DOCS.parent / "src")]

import torchdelta  # noqa: E402 - found through the line above
from torchdelta.planners import prediction  # noqa: E402
from torchdelta.pool.planned import PooledPlan  # noqa: E402
from torchdelta.simulate.model import Simulation  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# The annotations of `Prediction` name what is imported for type checkers only; autodoc looks them up.
prediction.Simulation, prediction.PooledPlan = Simulation, PooledPlan

project = "torchdelta"
author = "The torchdelta developers"
release = version = torchdelta.__version__
copyright = author  # noqa: A001 - Sphinx's own name for it

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "commands"]
exclude_patterns: list[str] = []
# In docstrings a single backtick is code, as in Markdown.
default_role = "code"
# "--option" stays as it is typed.
smartquotes = False

# A link to a page, a heading or a file that is not there is a warning, and so an error.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True

html_theme = "furo"
pygments_style = "default"  # colours what a diff adds and removes
pygments_dark_style = "monokai"
html_title = "torchdelta"
html_static_path = ["_static"]
html_css_files = ["torchdelta.css"]
html_show_sphinx = False
html_show_copyright = False
# Everything that a page needs is in the build: no font, script or picture comes from elsewhere.
html_copy_source = False
_OUTSIDE = re.compile(r"\]\((?P<target>(?:\.\./)+(?:benchmarks/results/(?P<name>[\w-]+)|[A-Z]+)\.md)\)")


def _link_outside(_app: "Sphinx", _page: str, source: list[str]) -> None:
    """Lead links to Markdown outside of this folder to the page that includes it, else to a copy of the file."""

    def replaced(link: re.Match[str]) -> str:
        page = f"results/{link['name']}.md"
        return f"](/{page})" if (_DOCS / page).exists() else f"](<path:{link['target']}>)"

    source[0] = _OUTSIDE.sub(replaced, source[0])


def setup(app: "Sphinx") -> None:
    """Register what is in this file."""
    app.connect("source-read", _link_outside)
