#!/usr/bin/env bash
# Makes the model files of the side-by-side measurements: the shape of Qwen3-0.6B with random weights.
# usage: scripts/make-peer-models.sh [DIR]   (default: $MINFER_PEERS or $HOME/.cache/minfer-peers, see build-peer.sh)
# Leaves DIR/models/qwen3-0.6b-rand-{BF16,Q8_0,Q4_0,Q4_K_M}.gguf (2.6 GB). PYTHON: an interpreter with numpy and gguf.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-${MINFER_PEERS:-$HOME/.cache/minfer-peers}}
bf16=$dir/models/qwen3-0.6b-rand-BF16.gguf

mkdir -p "$dir/models"
[ -f "$bf16" ] || "${PYTHON:-python3}" "$here/make_random_gguf.py" --preset qwen3-0.6b --out "$bf16" \
  --vocab-gguf "$dir/llama.cpp/models/ggml-vocab-qwen2.gguf"
for type in Q8_0 Q4_0 Q4_K_M; do
  out=$dir/models/qwen3-0.6b-rand-$type.gguf
  [ -f "$out" ] || "$dir/llama.cpp/build/bin/llama-quantize" "$bf16" "$out" "$type" "$(nproc)" >/dev/null 2>&1
  echo "$out"
done
