#!/usr/bin/env bash
# Writes small random models and llama.cpp's logits for them, for the tests that read MINFER_PEER_LOGITS.
# usage: scripts/peer-logits.sh OUTDIR   (needs build-peer.sh; PYTHON: an interpreter with numpy and gguf)
#
# For each NAME of OUTDIR/names: NAME.gguf, NAME.ids (40 or 200 token ids below 128, as text) and NAME.f32
# ([ids, vocabulary] little-endian f32 logits, computed with an f32 KV cache and plain attention).
#   llama llama-moe qwen2 qwen3 qwen3moe   llama.cpp's own test models (F32): they hold every optional tensor, also
#                                          per-tensor `.scale`, but weights so small that rope hardly shows (2e-4)
#   ARCH-tiny                              our models (F32): the tensors of published files, and weights for which each
#                                          part shows; llama with rope_freqs, qwen3moe with 2 of 8 experts
#   qwen3-tiny-TYPE, qwen3moe-tiny-TYPE    the same, quantised. llama.cpp rounds activations to 8 bits there, so only
#                                          engines that do likewise come close
#   deepseek4 glm5-next qwen4exp           llama.cpp's own test models with 200 ids, so that windows end and 128 positions
#                                          are compressed into a row; weights three times as large. llama.cpp's graphs of
#                                          the first two leave the file's `.scale` tensors and biases of q, k and v out,
#                                          that of the third is no reference by its own account
#   deepseek4-plain glm5-next-plain        the same with scales of one and biases of zero, so that these stand for nothing
#   deepseek4-sparse glm5-next-sparse      the same with an indexer that chooses 16 rows, not all
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: peer-logits.sh OUTDIR}
dir=${MINFER_PEERS:-$HOME/.cache/minfer-peers}
bin=$dir/llama.cpp/build/bin
ids=(3 17 99 42 5 0 127 64 88 23 71 101 12 36 55 90 7 118 29 80 14 61 110 2 47 95 33 76 19 104 58 121 8 67 40 25 83 113 50 1)
long=($(for i in {0..199}; do echo $(((i * 37 + i * i * 5 + 11) % 128)); done))

mkdir -p "$out"
out=$(cd "$out" && pwd)
: > "$out/names"
logits() { # NAME
  printf '%s\n' "${ids[@]}" > "$out/$1.ids"
  KV32=1 "$dir/dump_logits" "$out/$1.gguf" 2 "$out/$1.f32" "${ids[@]}"
  echo "$1" >> "$out/names"
}

for arch in llama qwen2 qwen3 qwen3moe; do
  "$bin/test-llama-archs" -s 1 -a "^$arch\$" -o "$out" >/dev/null 2>&1
done
mv "$out/llama-dense.gguf" "$out/llama.gguf" # llama-moe.gguf already has its name
mv "$out/qwen2-dense.gguf" "$out/qwen2.gguf"
mv "$out/qwen3-dense.gguf" "$out/qwen3.gguf"
mv "$out/qwen3moe-moe.gguf" "$out/qwen3moe.gguf"
for name in llama llama-moe qwen2 qwen3 qwen3moe; do logits "$name"; done

for arch in llama qwen2 qwen3 qwen3moe; do
  "${PYTHON:-python3}" "$here/make_random_gguf.py" --preset "$arch-tiny" --vocab-size 512 --outtype f32 \
    --vocab-gguf "$dir/llama.cpp/models/ggml-vocab-qwen2.gguf" --out "$out/$arch-tiny.gguf"
  logits "$arch-tiny"
done
for arch in qwen3 qwen3moe; do
  for type in Q8_0 Q4_0 Q4_1 Q4_K_M Q5_K_M Q6_K; do
    "$bin/llama-quantize" "$out/$arch-tiny.gguf" "$out/$arch-tiny-$type.gguf" "$type" 2 >/dev/null 2>&1
    logits "$arch-tiny-$type"
  done
done

ids=("${long[@]}")
for arch in deepseek4 glm5-next qwen4exp; do
  "$bin/test-llama-archs" -s 1 -d 0.3 -a "^$arch\$" -o "$out" >/dev/null 2>&1
  mv "$out/$arch-moe.gguf" "$out/$arch.gguf"
  logits "$arch"
done
for arch in deepseek4 glm5-next; do
  cp "$out/$arch.gguf" "$out/$arch-plain.gguf"
  "${PYTHON:-python3}" "$here/edit_gguf.py" "$out/$arch-plain.gguf"
  logits "$arch-plain"
  cmp "$out/$arch.f32" "$out/$arch-plain.f32" || { echo "llama.cpp reads scales or biases of $arch" >&2; exit 1; }
  cp "$out/$arch-plain.gguf" "$out/$arch-sparse.gguf"
  "${PYTHON:-python3}" "$here/edit_gguf.py" "$out/$arch-sparse.gguf" "$arch.attention.indexer.top_k=16"
  logits "$arch-sparse"
done
