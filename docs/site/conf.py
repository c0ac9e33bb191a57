"""The site of docs/, for Sphinx: `make docs`. Its navigation is the tables of index.md, in their order."""

import re

project = "windlass"
author = "the authors of windlass"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["site"]
html_theme = "furo"
html_title = "windlass"
html_show_sourcelink = False
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4  # as GitHub names them: pages link to each other's headings
copybutton_prompt_text = ""
highlight_language = "none"  # an indented block is a terminal's


def with_navigation(_app: object, page: str, source: list[str]) -> None:
    """A toctree for each section of index.md, of the pages that its table links to."""
    if page != "index":
        return
    for title, section in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", source[0], re.MULTILINE):
        pages = "\n".join(re.findall(r"\]\(([\w/.-]+)\.md\)", section))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def setup(app) -> None:
    app.connect("source-read", with_navigation)
