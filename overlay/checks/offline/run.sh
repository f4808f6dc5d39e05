#!/usr/bin/env bash
# Runs a line's checks on this machine's CUDA device; the bundle needs no network.
#
#   bash run.sh OUT                receipt, log and JUnit report into the folder OUT
#   bash run.sh OUT WORDS...       the same with words for pytest; part of the tests: no receipt
#   bash run.sh OUT --speed        only measure the patched path: OUT/speed.json
#   bash run.sh OUT --all          the checks, then the measurement
#
# PYTHON names the interpreter (default: python3); it has torch, triton, numpy, transformers.
set -uo pipefail

out=${1:?usage: run.sh OUT [--speed | --all | words for pytest]}
shift
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit
cd "$(dirname "${BASH_SOURCE[0]}")" || exit
here=$PWD
python=${PYTHON:-python3}

sha256sum --quiet --check CONTENTS.txt || exit
"$python" unpack.py wheels deps || exit
"$python" -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else
    "error: torch finds no CUDA device here; these checks need one")' || exit

export PYTHONPATH=$here/site:$here/deps OVERLAY_DEVICE=cuda
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1  # none of what else this machine has
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING
export TRITON_CACHE_DIR=$here/cache/triton VLLM_CACHE_ROOT=$here/cache/vllm
export FLASHINFER_WORKSPACE_BASE=$here/cache

status=0
if [ "${1:-}" != --speed ]; then
    words=("$@")
    [ "${1:-}" = --all ] && words=("${@:2}")
    "$python" unpack.py --head head.json "$out" > head-here.json || exit
    OVERLAY_LINE=$("$python" -c 'import json; print(json.load(open("head.json"))["line"])')
    export OVERLAY_LINE
    OVERLAY_RECEIPT=$here/head-here.json "$python" -m pytest -p overlay.checks.receipt_plugin \
        -p no:cacheprovider --junitxml="$out/junit.xml" --durations=15 tests/patched "${words[@]}" 2>&1 |
        tee "$out/pytest.log"
    status=${PIPESTATUS[0]}
fi
if [ "${1:-}" = --speed ] || [ "${1:-}" = --all ]; then
    "$python" tests/patched/speed.py "$out/speed.json" 2>&1 | tee "$out/speed.log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
fi
exit "$status"
