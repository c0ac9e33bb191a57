#!/bin/sh
# Makes .venv-site: Sphinx with MyST and the theme Furo, which make a site of docs/ (`make docs`). sh scripts/site_environment.sh
#
# A virtual environment of its own, since training needs none of them.
set -eu
cd "$(dirname "$0")/.."
environment=.venv-site
[ -f "$environment/stamp" ] && exit 0
rm -rf "$environment"
.venv/bin/python -m venv "$environment"
"$environment/bin/python" -m pip install --disable-pip-version-check --quiet "sphinx>=9,<10" "myst-parser>=5,<6" "furo>=2025.12.19" \
    "sphinx-copybutton>=0.5.2"
"$environment/bin/python" -c 'import sphinx; print("== sphinx", sphinx.__version__, "in .venv-site")'
touch "$environment/stamp"
