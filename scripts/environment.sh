#!/bin/sh
# Makes .venv with the packages of requirements.lock and windlass itself, editable. Called by make; safe to call again.
#
# pip, not uv, because pip reads the user's own pip configuration: where that names the CPU build of torch, the CPU build is
# what comes. PYTHON=python3.12 chooses another interpreter; else the first of the list that is new enough and has ensurepip
# (`python -m venv` without it exits with 1 and leaves an environment that has no pip).
set -eu
cd "$(dirname "$0")/.."

chosen="" found="" no_ensurepip=""
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    found="$found $candidate is $version;"
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
    if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        no_ensurepip="$candidate"
        continue
    fi
    chosen="$candidate"
    break
done

if [ -z "$chosen" ] && [ -n "$no_ensurepip" ]; then
    echo "windlass: $no_ensurepip cannot make a virtual environment, because its module ensurepip is missing." >&2
    echo "  change: install the package python3-venv (for instance: sudo apt-get install python3-venv), then run make again." >&2
    exit 1
fi
if [ -z "$chosen" ]; then
    echo "windlass: Python 3.11 or newer is needed;${found:- no Python was found} none of them will do." >&2
    echo "  change: install python3.11 (or newer) and python3-venv, or name one: make PYTHON=/path/to/python3.12" >&2
    exit 1
fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "== environment: .venv, made with $chosen ($("$chosen" --version))"
    rm -rf .venv
    "$chosen" -m venv .venv
elif [ ! -e .venv/stamp ]; then
    echo "== environment: .venv is there already; its packages are replaced by the versions of requirements.lock"
fi
if [ -t 1 ]; then quiet=""; else quiet="--quiet"; fi
install=".venv/bin/python -m pip install --disable-pip-version-check $quiet"
echo "== environment: installing the $(wc -l <requirements.lock) packages of requirements.lock (a minute or two)"
$install -r requirements.lock
echo "== environment: installing windlass itself, editable"
$install --no-deps --no-build-isolation --editable .
touch .venv/stamp
