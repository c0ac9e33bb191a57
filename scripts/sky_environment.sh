#!/bin/sh
# Makes .venv-sky: SkyPilot, whose own reader checks the tasks that we write (tests/launch/test_sky.py). sh scripts/sky_environment.sh
#
# A virtual environment of its own, since its dozens of dependencies are not in requirements.lock.
set -eu
cd "$(dirname "$0")/.."
environment=.venv-sky
[ -f "$environment/stamp" ] && exit 0
rm -rf "$environment"
.venv/bin/python -m venv "$environment"
"$environment/bin/python" -m pip install --disable-pip-version-check --quiet "skypilot>=0.14.1,<0.15"
"$environment/bin/python" -c 'import sky; print("== skypilot", sky.__version__, "in .venv-sky")'
touch "$environment/stamp"
