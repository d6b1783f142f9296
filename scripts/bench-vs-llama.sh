#!/usr/bin/env bash
# Measures minfer against llama.cpp in alternating pairs on this machine.
# usage: scripts/bench-vs-llama.sh [OPTION...]   (options: see bench_pairs.py --help; e.g. --pairs 9 --quant q4_0)
# Needs build-peer.sh and make-peer-models.sh once, and `cargo build --release`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
peers=${MINFER_PEERS:-$HOME/.cache/minfer-peers}
[ -x "$peers/bwprobe" ] || gcc -O3 -march=native -fopenmp "$here/bwprobe.c" -o "$peers/bwprobe"
exec python3 "$here/bench_pairs.py" --peers "$peers" "$@"
