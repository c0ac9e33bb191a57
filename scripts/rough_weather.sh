#!/usr/bin/env bash
# The quick set in rough weather: processes of the tests are paused at random, and only AVX2 is used.
#
#     scripts/rough_weather.sh [pytest's arguments]      SEED=1 PAUSE_MS=800 (below 1000) as defaults
#
# Both found what refused a landing: a pause in the wrong place shows a race or a deadline that is a second too short, and another
# instruction set shows a number that was only equal on this machine. One process below pytest at a time is stopped for up to
# PAUSE_MS, drawn by SEED. The first line printed is the seed. pytest itself is not paused.
# Only descendants of the pytest that this script starts are stopped, and each is continued before the next.
# Code compiled for another instruction set must not be loaded, so inductor gets a cache directory of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

SEED=${SEED:-1}
PAUSE_MS=${PAUSE_MS:-800}
PY=${PY:-.venv/bin/python}
RANDOM=$SEED

own=$(mktemp -d)
export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 TORCHINDUCTOR_CACHE_DIR="$own/inductor"
echo "rough weather: SEED=$SEED, pauses of up to $PAUSE_MS ms, AVX2 only"

if (($#)); then arguments=("$@"); else arguments=(-n 2 --dist loadfile); fi
"$PY" -m pytest "${arguments[@]}" &
pytest=$!
paused=
clean_up() {
    [[ -z $paused ]] || kill -CONT "$paused" 2>/dev/null || true
    if [[ -n $pytest ]]; then kill -TERM "$pytest" 2>/dev/null && wait "$pytest" || true; fi
    rm -rf "$own"
}
trap clean_up EXIT

descendants() { # of $1, without it
    local child
    for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do
        echo "$child"
        descendants "$child"
    done
}

pause_s() { printf '0.%03d' $((RANDOM % PAUSE_MS)); }

pauses=0
while kill -0 "$pytest" 2>/dev/null; do
    mapfile -t found < <(descendants "$pytest")
    if ((${#found[@]})); then
        paused=${found[RANDOM % ${#found[@]}]}
        if kill -STOP "$paused" 2>/dev/null; then
            pauses=$((pauses + 1))
            sleep "$(pause_s)"
            kill -CONT "$paused" 2>/dev/null || true
        fi
        paused=
    fi
    sleep "$(pause_s)"
done
status=0
wait "$pytest" || status=$?
pytest=
echo "rough weather: $pauses pauses, pytest left with $status; SEED=$SEED"
exit "$status"
