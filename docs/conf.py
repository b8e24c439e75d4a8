"""Build the documentation with Sphinx: `make docs`, from files of this repository alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
# The tutorials' kernels inherit both: they call `sottovoce` as a user does, on the processor.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from sottovoce._version import __version__

project = "sottovoce"
author = "the authors of sottovoce"
project_copyright = "the authors of sottovoce, Apache-2.0"
release = version = __version__

extensions = ["myst_nb", "generated"]
exclude_patterns = ["_ext"]
source_suffix = {".md": "myst-nb"}

# Markdown: headings can be linked to as on GitHub.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
# Tutorials are executed anew at every build, and a failing cell fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_merge_streams = True

# Blocks with an ellipsis are no whole programs; they are shown without colours.
suppress_warnings = ["misc.highlighting_failure", "mystnb.unknown_mime_type"]

toc_object_entries = False  # the headings of the reference suffice
maximum_signature_line_length = 90

html_theme = "furo"
html_title = f"sottovoce {release}"
html_static_path = ["_static"]
html_css_files = ["sottovoce.css"]
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
