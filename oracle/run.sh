#!/usr/bin/env bash
# Makes tests-data/oracle anew. usage: oracle/run.sh   (PYTHON: an interpreter with the packages of oracle/README.md)
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
full=$(mktemp -d)
trap 'rm -rf "$full"' EXIT
one() { # NAME GENERATOR [OPTION...]
  "$python" "gen_$2.py" --out "$full/$1" "${@:3}"
  "$python" slim.py "$full/$1" "../tests-data/oracle/$1"
}
one llama llama
one llama_plain llama --plain
one qwen2 qwen2
one qwen3 qwen3
one qwen3_moe qwen3_moe
one qwen4_exp qwen4_exp
"$python" gen_qwen4_exp_mtp.py --out "$full/qwen4_exp"
cp "$full"/qwen4_exp/{mtp_hf,golden_mtp}.safetensors ../tests-data/oracle/qwen4_exp/
one glm5_next glm5_next
"$python" gen_glm5_next_mtp.py --out "$full/glm5_next"
cp "$full"/glm5_next/{mtp,golden_mtp}.safetensors ../tests-data/oracle/glm5_next/
one deepseek_v4 deepseek_v4
"$python" gen_deepseek_v4_mtp.py --out "$full/deepseek_v4"
one deepseek_v4_official deepseek_v4 --official --len 132 --decode 6 --seed 31
cp "$full"/deepseek_v4/{mtp_legacy,dspark,golden_mtp}.safetensors ../tests-data/oracle/deepseek_v4/
