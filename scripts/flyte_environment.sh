#!/bin/sh
# Makes .venv-flyte: Flyte 2 and its PyTorch plugin over the packages of .venv, for tests/flyte. sh scripts/flyte_environment.sh
#
# A virtual environment of its own, since Flyte is an extra whose dozens of dependencies are not in requirements.lock.
set -eu
cd "$(dirname "$0")/.."
environment=.venv-flyte
[ -f "$environment/stamp" ] && exit 0
rm -rf "$environment"
.venv/bin/python -m venv "$environment"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" >"$("$environment/bin/python" -c "$packages")/windlass-packages.pth"
"$environment/bin/python" -m pip install --disable-pip-version-check --quiet "flyte>=2.12,<3" "flyteplugins-pytorch>=2.12,<3"
"$environment/bin/python" -c 'import flyte; print("== flyte", flyte.__version__, "in .venv-flyte")'
touch "$environment/stamp"
