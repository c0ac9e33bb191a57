#!/bin/sh
# Makes .venv-litgpt, a virtual environment of its own with LitGPT: sh scripts/litgpt_environment.sh
#
# Only for its rows of benchmarks/throughput.py. It cannot share our environment: litgpt 0.5.13 pins huggingface-hub<1.4.
# PYTHON=python3.12 chooses another interpreter.
set -eu
cd "$(dirname "$0")/.."
environment=.venv-litgpt
[ -f "$environment/stamp" ] && exit 0
rm -rf "$environment"
"${PYTHON:-python3.11}" -m venv "$environment"
"$environment/bin/python" -m pip install --disable-pip-version-check --quiet "torch==2.13.0" "litgpt==0.5.13" "lightning==2.6.6"
"$environment/bin/python" -c 'from importlib.metadata import version; print("== litgpt", version("litgpt"), "in .venv-litgpt")'
touch "$environment/stamp"
