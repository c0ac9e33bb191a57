#!/bin/sh
# What `make test-all` needs beside .venv: programs of Debian's packages, and Python packages that the lock leaves out, since users
# take them as extras. sh scripts/test_programs.sh
#
# On another system, install them by hand: the tests name what is missing, and `make test-all` fails by it.
set -eu
cd "$(dirname "$0")/.."
packages="slurmctld slurmd slurm-client munge openmpi-bin mpich iproute2 chromium ceph-mon ceph-osd ceph-common radosgw"
missing=""
for package in $packages; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || missing="$missing $package"
done
if [ -n "$missing" ]; then
    echo "== apt-get install$missing"
    # shellcheck disable=SC2086  # names of packages
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $missing >/dev/null ||
        echo "== not installed; install by hand, or the tests that need one are red:$missing"
fi
[ -f build/axe/package/axe.min.js ] || {
    echo "== axe-core, which reads the report as a screen reader would, into build/axe"
    mkdir -p build/axe
    (cd build/axe && npm pack --silent axe-core@4 >/dev/null && tar xzf axe-core-4.*.tgz package/axe.min.js) ||
        echo "== not there: npm; or the test of accessibility is red"
}
.venv/bin/python -c "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ('lm_eval', 'wandb', 'trackio'))))" || {
    echo "== the extras eval, wandb and trackio, into .venv"
    mkdir -p build
    grep --invert-match "^pillow==" requirements.lock >build/constraints.txt # trackio 0.43 takes none from 13 on
    .venv/bin/python -m pip install --disable-pip-version-check --quiet --constraint build/constraints.txt "lm-eval>=0.4.13" \
        wandb "trackio>=0.43"
}
