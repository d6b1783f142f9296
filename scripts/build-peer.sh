#!/usr/bin/env bash
# Builds llama.cpp, the engine that minfer is measured against, out of the source package of llama-cpp-python on PyPI,
# and our own tools that need it. Nothing of llama.cpp is kept in this repository. About 15 minutes on 2 cores, once.
# usage: scripts/build-peer.sh [DIR]   (default: $MINFER_PEERS or $HOME/.cache/minfer-peers)
# Leaves DIR/llama.cpp/build/bin/{llama-bench,llama-quantize,test-llama-archs,...}, DIR/dump_logits and DIR/bwprobe.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-${MINFER_PEERS:-$HOME/.cache/minfer-peers}}
package=llama-cpp-python version=0.3.36 # llama.cpp 0c1e57098 of 1 Oct 2026
targets=(llama-bench llama-batched-bench llama-completion llama-server llama-quantize llama-perplexity llama-tokenize test-llama-archs)

mkdir -p "$dir"
cd "$dir"
for tool in cmake ninja g++; do
  command -v "$tool" >/dev/null || { echo "$tool is missing: apt-get install cmake ninja-build g++" >&2; exit 1; }
done
if [ ! -d llama.cpp ]; then
  sdist=llama_cpp_python-$version.tar.gz
  [ -f "$sdist" ] || python3 -m pip download -q --no-deps --no-binary "$package" -d . "$package==$version"
  mkdir llama.cpp
  tar xzf "$sdist" -C llama.cpp --strip-components=3 --wildcards '*/vendor/llama.cpp'
  rm -f llama.cpp/.git # a pointer into the package's repository, which would confuse cmake
fi
missing=0
for t in "${targets[@]}"; do [ -x "llama.cpp/build/bin/$t" ] || missing=1; done
if [ $missing = 1 ]; then
  cmake -S llama.cpp -B llama.cpp/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=ON \
    -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=ON \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
  ninja -C llama.cpp/build -j"$(nproc)" "${targets[@]}"
fi

bin=$PWD/llama.cpp/build/bin
g++ -O2 -std=c++17 -Illama.cpp/include -Illama.cpp/ggml/include "$here/dump_logits.cpp" \
  -L"$bin" -lllama -lggml -lggml-base -Wl,-rpath,"$bin" -o dump_logits
gcc -O3 -march=native -fopenmp "$here/bwprobe.c" -o bwprobe
echo "$dir"
