"""How the documentation is built: ``sphinx-build -W -b html docs docs/_build``."""

import importlib.metadata
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
ROOT = HERE.parent

project = "specmodel"
author = "The specmodel authors"
copyright = author  # noqa: A001
release = importlib.metadata.version("specmodel")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
suppress_warnings = ["toc.empty_glob"]  # a shelf may be empty
html_theme = "furo"
html_title = f"specmodel {release}"
html_show_sphinx = False
nitpicky = False

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures have them; numpydoc sections say what they mean
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

nb_execution_mode = "off"


def execute_notebooks() -> None:
    """Run the notebooks where they lie and put them, with outputs, where Sphinx finds them."""
    target = HERE / "notebooks"
    target.mkdir(exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        where = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=120, resources=where).execute()
        nbformat.write(notebook, target / path.name)


execute_notebooks()
