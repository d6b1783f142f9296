"""Measures minfer against llama.cpp for docs/performance.md, on one quiet machine.

usage: scripts/performance_table.py [--peers DIR] [--pairs N] [--only SUBSTRING,...] [--minfer PROGRAM]

Every row alternates the two programs, the first of them in turn, with a probe of the memory bandwidth before and
after each run (see bench_pairs.py, whose runs these are), and prints a line of a Markdown table: the median speeds,
the median ratio with its range, the share of the probed bandwidth that the bytes of the weights (and of keys and
values, at depth) need at minfer's speed, and the largest share of the machine that other programs used meanwhile.
`rss` rows compare the peak resident memory of one run each. Needs build-peer.sh and make-peer-models.sh.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from types import SimpleNamespace

import bench_pairs

QWEN3 = "qwen3-0.6b-rand-"
# Weights that a token reads, in MB (the tied head whole, of the experts only the chosen ones), from the tensors' sizes.
READ_MB = {
    QWEN3 + "Q4_0": 375.6, QWEN3 + "Q4_K_M": 390.7, QWEN3 + "Q6_K": 489.1, QWEN3 + "Q8_0": 633.4,
    QWEN3 + "F16": 1192.2, QWEN3 + "BF16": 1192.2,
}
# Bytes of keys and values of a position: 28 layers, 8 heads of 128, two of them, f16.
KV_BYTES = 28 * 2 * 8 * 128 * 2


def rows():
    """(model, test, threads, depth, sequences, pairs factor)"""
    quantised = ["Q4_0", "Q4_K_M", "Q6_K", "Q8_0"]
    for q in [*quantised, "F16", "BF16"]:
        yield QWEN3 + q, "tg64", 2, 0, 1
    for q in quantised:
        yield QWEN3 + q, "tg64", 1, 0, 1
    for q in [*quantised, "F16", "BF16"]:
        yield QWEN3 + q, "pp512", 2, 0, 1
    for model in ["qwen2.5-0.5b-rand-Q4_K_M", "qwen3moe-small-rand-Q4_0", "qwen3moe-small-rand-Q4_K_M", "SmolLM2-135M-Q4_1"]:
        yield model, "tg64", 2, 0, 1
        yield model, "pp512", 2, 0, 1
    yield QWEN3 + "Q4_0", "tg32", 2, 0, 8
    yield QWEN3 + "Q4_0", "tg32", 2, 4096, 1
    yield QWEN3 + "Q4_0", "tg16", 2, 16384, 1


def commands(args, model, test, threads, depth, sequences):
    path = args.smollm2 if model.startswith("SmolLM2") else f"{args.peers}/models/{model}.gguf"
    kind, count = test[:2], test[2:]
    bin_dir = os.path.dirname(args.llama)
    work = ["-p", count, "-n", "0"] if kind == "pp" else ["-p", "0", "-n", count]
    ours = [args.minfer, "bench", "-m", path, *work, "-t", str(threads), "-d", str(depth), "-r", "1", "-o", "json"]
    if sequences > 1:
        ours += ["-b", str(sequences)]
        peer = [f"{bin_dir}/llama-batched-bench", "-m", path, "-t", str(threads), "-c", "4096", "-npp", "16",
                "-ntg", count, "-npl", str(sequences), "--output-format", "jsonl"]
    else:
        peer = [args.llama, "-m", path, *work, "-t", str(threads), "-d", str(depth), "-r", "1", "-o", "json"]
        # Without flash attention llama.cpp's decoding at depth is faster on this CPU: take its better side.
        if depth:
            peer += ["-fa", "0"]
    return ours, peer


def parse_minfer(text):
    return json.loads(text)[-1]["tokens_per_second"]


def parse_llama(text):
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and '"speed_tg"' in line]
    return lines[-1]["speed_tg"] if lines else json.loads(text)[-1]["avg_ts"]


def measure(args, model, test, threads, depth, sequences):
    ours, peer = commands(args, model, test, threads, depth, sequences)
    setup = SimpleNamespace(peers=args.peers, threads=threads)
    results = []
    for i in range(args.pairs if depth < 10000 else 1):
        sides = {"ours": (ours, parse_minfer), "peer": (peer, parse_llama)}
        order = list(sides) if i % 2 == 0 else list(reversed(sides))
        runs = {}
        for side in order:
            command, parse = sides[side]
            runs[side] = bench_pairs.Run(command, lambda entries, _, parse=parse: parse(entries), test, setup, raw=True)
        results.append((runs["ours"], runs["peer"]))
    ratios = [a.rate / b.rate for a, b in results]
    rate = statistics.median(a.rate for a, _ in results)
    probe = statistics.median(statistics.mean(a.bandwidth) for a, _ in results)
    foreign = max(max(a.foreign, b.foreign) for a, b in results)
    share = ""
    if test.startswith("tg") and sequences == 1 and model in READ_MB:
        bytes_read = READ_MB[model] * 1e6 + depth * KV_BYTES
        share = f"{100 * statistics.median(a.rate * bytes_read / 1e9 / statistics.mean(a.bandwidth) for a, _ in results):.0f} %"
    name = f"{test}{f' @ {depth}' if depth else ''}{f' x{sequences}' if sequences > 1 else ''}"
    print(f"| {model} | {name} | {threads} | {rate:.1f} | {statistics.median(b.rate for _, b in results):.1f} "
          f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {probe:.0f} | {share} "
          f"| {foreign:.0f} % |", flush=True)


def peak_mib(command):
    """Peak resident memory of one run, from the kernel's account of the child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.execvp(command[0], command)
    os.close(read), os.close(write)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_maxrss / 1024


def memory(args, model):
    ours, peer = commands(args, model, "pp512", 2, 0, 1)
    a, b = peak_mib(ours), peak_mib(peer)
    print(f"| {model} | peak MiB, pp512 | 2 | {a:.0f} | {b:.0f} | {a / b:.2f} | | | |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peers", default=os.environ.get("MINFER_PEERS", os.path.expanduser("~/.cache/minfer-peers")))
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--only", default="", help="rows whose 'model test threads' contains one of these")
    p.add_argument("--minfer", default="target/release/minfer")
    p.add_argument("--llama", help="llama-bench (default: of --peers)")
    p.add_argument("--smollm2", help="SmolLM2-135M Q4_1 (default: scripts/fetch-models.sh)")
    args = p.parse_args()
    args.llama = args.llama or f"{args.peers}/llama.cpp/build/bin/llama-bench"
    here = os.path.dirname(os.path.abspath(__file__))
    if not args.smollm2:
        fetched = subprocess.run([f"{here}/fetch-models.sh"], capture_output=True, text=True)
        args.smollm2 = fetched.stdout.splitlines()[-1] if fetched.returncode == 0 else None
    wanted = [w for w in args.only.split(",") if w]
    cpu = re.search(r"model name\s*: (.*)", open("/proc/cpuinfo").read())
    print(f"{cpu.group(1) if cpu else '?'}, {os.cpu_count()} CPUs, {args.pairs} pairs")
    print("| model | test | threads | minfer | llama.cpp | ratio (range) | probe GB/s | share | foreign |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows():
        label = f"{row[0]} {row[1]} t{row[2]} d{row[3]} x{row[4]}"
        if wanted and not any(w in label for w in wanted):
            continue
        if row[0].startswith("SmolLM2") and not args.smollm2:
            print(f"skipped: {label}: the package registry with SmolLM2 is not reachable", file=sys.stderr)
            continue
        measure(args, *row)
    for model in [QWEN3 + q for q in ["Q4_0", "Q4_K_M", "Q6_K", "Q8_0", "F16", "BF16"]]:
        if not wanted or any(w in f"{model} rss" for w in wanted):
            memory(args, model)


if __name__ == "__main__":
    main()
