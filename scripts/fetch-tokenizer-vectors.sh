#!/bin/sh
# Fetches llama.cpp's tokenizer vocabularies, their test vectors and its collection of chat templates.
#
#   scripts/fetch-tokenizer-vectors.sh DIR
#   MINFER_VOCAB_DIR=DIR cargo test -p minfer-text -- --include-ignored --nocapture
#
# They come out of the source distribution of the PyPI package llama-cpp-python, which is pinned; nothing
# of it is built or committed. DIR then holds ggml-vocab-*.gguf, *.gguf.inp, *.gguf.out and templates/.
set -eu

version=0.3.36
dir=${1:?usage: fetch-tokenizer-vectors.sh DIR}
python=${PYTHON:-python3}

mkdir -p "$dir"
tmp=$(mktemp -d "${TMPDIR:-/tmp}/tokenizer-vectors.XXXXXX")
trap 'rm -rf "$tmp"' EXIT

"$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$tmp" "llama-cpp-python==$version"

root="llama_cpp_python-$version/vendor/llama.cpp/models"
tar -xzf "$tmp/llama_cpp_python-$version.tar.gz" -C "$tmp" --wildcards "$root/ggml-vocab-*" "$root/templates/*.jinja"
cp -R "$tmp/$root/." "$dir/"
echo "$(ls "$dir"/ggml-vocab-*.gguf | wc -l) vocabularies, $(ls "$dir"/*.out | wc -l) with vectors, $(ls "$dir"/templates/*.jinja | wc -l) templates in $dir"
