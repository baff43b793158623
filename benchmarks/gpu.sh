#!/usr/bin/env bash
# A quarter of an hour on a GPU: finds a Python that has torch and the device, and runs benchmarks/gpu.py with it.
# benchmarks/gpu.sh --help says the rest.
set -euo pipefail

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    printf 'gpu.sh: %s\n' "$*" >&2
    exit 2
}

# What a Python is asked: whether torch is there, and has an accelerator unless this is a rehearsal.
asked='import importlib.util, sys
if importlib.util.find_spec("torch") is None:
    sys.exit("torch is not installed")
if sys.argv[1] == "--rehearse":
    sys.exit()
import torch
if not torch.accelerator.is_available():
    sys.exit(f"torch {torch.__version__} finds no accelerator")'

mode=""
for argument in "$@"; do
    case "$argument" in
    --rehearse) mode=--rehearse ;;
    --help | -h) mode=--help ;;
    esac
    [ "$mode" = --help ] && break
done

tried=""
for python in ${GPU_PYTHON:+"$GPU_PYTHON"} "$folder/../.venv/bin/python" python3 python python3.12 python3.11 python3.13; do
    path=$(command -v "$python" 2>/dev/null) || path=""
    if [ -z "$path" ]; then
        said="not found"
    elif ! said=$("$path" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "older than Python 3.11")' 2>&1); then
        :
    elif [ "$mode" = --help ] || said=$("$path" -c "$asked" "${mode:-run}" 2>&1); then
        exec "$path" "$folder/gpu.py" "$@"
    fi
    tried+="
  $python: ${said##*$'\n'}"
    [ -n "${GPU_PYTHON:-}" ] && break # what was named is used, or nothing
done
fail "expected a Python of version 3.11 or newer with torch and an accelerator that it can use, found:$tried
Name one (GPU_PYTHON=/path/to/python), install torch for this machine, or try the script without one: --rehearse"
