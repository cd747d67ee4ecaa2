"""Sphinx: the pages of docs/ and the public API, from its docstrings. `make docs` builds them into build/docs."""

import elastic

project = "Elastic"
author = "The Elastic contributors"
version = release = elastic.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinxcontrib.mermaid"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Elastic {release}"

default_role = "code"  # docstrings write names in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
