"""Sphinx configuration: Markdown through MyST, the version read from the package itself."""

import re
from pathlib import Path

_face = Path(__file__).parents[1] / "axcore" / "__init__.py"
_found = re.search(r'^__version__ = "(.+)"$', _face.read_text(), re.MULTILINE)
if _found is None:
    raise ValueError(f"{_face}: expected a line '__version__ = \"...\"'")

project = "axcore"
author = "The axcore authors"
project_copyright = "The axcore authors"
version = release = _found[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_typehints = "description"
html_theme = "alabaster"
html_theme_options = {"description": "Train and serve large models on JAX", "fixed_sidebar": True}
