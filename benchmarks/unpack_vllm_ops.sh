#!/bin/sh
# Unpacks five files of a vLLM 0.33.0 wheel into a folder, for benchmarks/vllm_baseline.py.
#
#     benchmarks/unpack_vllm_ops.sh OUT [WHEEL]
#
# Without WHEEL, pip downloads the wheel (no dependencies) into a temporary folder. The files are part of the vLLM
# project, under Apache-2.0; git ignores .vllm_ops/, so that they are not committed.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 OUT [WHEEL]" >&2
    exit 2
fi
python=${PYTHON:-python3}
out=$1
wheel=${2:-}
if [ -z "$wheel" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$scratch" vllm==0.33.0
    wheel=$(ls "$scratch"/vllm-0.33.0-*.whl)
fi
mkdir -p "$out"
"$python" - "$wheel" "$out" <<'PROGRAM'
import sys
import zipfile

wheel, out = sys.argv[1:]
names = ("lora_shrink_op", "lora_expand_op", "kernel_utils", "utils", "lora_kernel_metadata")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(out, [f"vllm/lora/ops/triton_ops/{name}.py" for name in names])
PROGRAM
echo "unpacked $(basename "$wheel") into $out"
