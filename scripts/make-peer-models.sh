#!/usr/bin/env bash
# Makes the model files of the side-by-side measurements: well-known shapes with random weights.
# usage: scripts/make-peer-models.sh [DIR]   (default: $MINFER_PEERS or $HOME/.cache/minfer-peers, see build-peer.sh)
# Leaves DIR/models/SHAPE-rand-TYPE.gguf (6 GB). PYTHON: an interpreter with numpy and gguf.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-${MINFER_PEERS:-$HOME/.cache/minfer-peers}}

mkdir -p "$dir/models"
make() { # SHAPE TYPE...
  local shape=$1 base=$dir/models/$1-rand-BF16.gguf type out
  shift
  [ -f "$base" ] || "${PYTHON:-python3}" "$here/make_random_gguf.py" --preset "$shape" --out "$base" \
    --vocab-gguf "$dir/llama.cpp/models/ggml-vocab-qwen2.gguf"
  for type in "$@"; do
    out=$dir/models/$shape-rand-$type.gguf
    [ -f "$out" ] || "$dir/llama.cpp/build/bin/llama-quantize" "$base" "$out" "$type" "$(nproc)" >/dev/null 2>&1
    echo "$out"
  done
}
make qwen3-0.6b Q8_0 Q4_0 Q4_K_M Q6_K F16
make qwen2.5-0.5b Q4_K_M
make qwen3moe-small Q4_0 Q4_K_M
