"""Alternating runs of `minfer bench` and `llama-bench` on one machine (called by bench-vs-llama.sh).

A shared host changes its speed from minute to minute, so single figures say little. Each pair runs the
two programs one after the other, the first of them in turn, with a probe of the memory bandwidth before
and after each run; the ratio within a pair is the result, its median and its range over the pairs the
summary. Each run gets its own scheduler group at the highest priority, where the kernel allows it.

`foreign` is the share of the machine that everything else used during a run, in percent. Pairs with
more than --max-foreign are marked `!` and left out of the summary if any others remain.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import time

TICKS = os.sysconf("SC_CLK_TCK")
CPUS = os.cpu_count()
OWN_GROUP = "echo -19 2>/dev/null > /proc/self/autogroup; exec \"$@\""


def busy_seconds():
    """CPU seconds that the whole machine has spent on work (user, nice, system, irq, softirq) since boot."""
    with open("/proc/stat") as f:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, f.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / TICKS


def children_seconds():
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime


def alone(command):
    """Runs a command in its own scheduler group and returns its standard output."""
    done = subprocess.run(["setsid", "-w", "sh", "-c", OWN_GROUP, "sh", *command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def bandwidth(peers, threads):
    """GB/s."""
    return float(alone([f"{peers}/bwprobe", str(threads)]))


def parse_minfer(entries, test):
    return next(e["tokens_per_second"] for e in entries if e["test"] == test)


def parse_llama(entries, test):
    kind, count = test[:2], int(test[2:])
    key = {"pp": "n_prompt", "tg": "n_gen"}[kind]
    return next(e["avg_ts"] for e in entries if e[key] == count)


class Run:
    """One run of one program: tokens per second and what else happened on the machine. `parse` gets the printed JSON, or
    the text itself if `raw`."""

    def __init__(self, command, parse, test, args, raw=False):
        self.bandwidth = [bandwidth(args.peers, args.threads)]
        busy, own, start = busy_seconds(), children_seconds(), time.time()
        output = alone(command)
        wall = time.time() - start
        others = busy_seconds() - busy - (children_seconds() - own)
        self.foreign = max(0.0, 100 * others / (wall * CPUS))
        self.bandwidth.append(bandwidth(args.peers, args.threads))
        self.rate = parse(output if raw else json.loads(output), test)

    def __str__(self):
        before, after = self.bandwidth
        return f"{self.rate:8.1f} ({before:.0f}->{after:.0f} GB/s, {self.foreign:.0f} %)"


def commands(args, test):
    """The two command lines for `test`, with the same amount of work."""
    count = test[2:]
    work = ["-p", count, "-n", "0"] if test.startswith("pp") else ["-p", "0", "-n", count]
    work += ["-d", str(args.depth), "-t", str(args.threads), "-r", str(args.repetitions), "-o", "json"]
    ours = [*args.minfer.split(), "bench", "--shape", f"{args.shape}:{args.quant.lower()}", *work]
    model = args.model or f"{args.peers}/models/{args.shape}-rand-{args.quant.upper()}.gguf"
    peer = [args.llama or f"{args.peers}/llama.cpp/build/bin/llama-bench", "-m", model, *work]
    return ours, peer


def summary(name, values, unit=""):
    return f"{name} median {statistics.median(values):.3f}{unit} (min {min(values):.3f}, max {max(values):.3f})"


def measure(test, args):
    ours, peer = commands(args, test)
    print(f"\n== {test} {args.shape} {args.quant}, {args.threads} threads, depth {args.depth}")
    print(f"minfer: {' '.join(ours)}\npeer:   {' '.join(peer)}")
    pairs = []
    for i in range(args.pairs):
        sides = {"minfer": (ours, parse_minfer), "peer": (peer, parse_llama)}
        order = list(sides) if i % 2 == 0 else list(reversed(sides))
        runs = {side: Run(*sides[side], test, args) for side in order}
        a, b = runs["minfer"], runs["peer"]
        loud = max(a.foreign, b.foreign) > args.max_foreign
        pairs.append((a, b, loud))
        load = os.getloadavg()[0]
        print(f"pair {i + 1}{'!' if loud else ' '} minfer {a}  peer {b}  ratio {a.rate / b.rate:.3f}  load {load:.1f}",
              flush=True)
    quiet = [p for p in pairs if not p[2]] or pairs
    print(f"{test}: {len(quiet)} of {len(pairs)} pairs"
          + ("" if not all(p[2] for p in pairs) else " (ALL with other work on the machine)"))
    print(f"{test}: " + summary("ratio minfer/peer", [a.rate / b.rate for a, b, _ in quiet]))
    print(f"{test}: " + summary("minfer", [a.rate for a, _, _ in quiet], " tok/s"))
    print(f"{test}: " + summary("peer", [b.rate for _, b, _ in quiet], " tok/s"))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peers", required=True, help="the folder of build-peer.sh")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--tests", default="tg64,pp512", help="tgN: decode N tokens; ppN: prefill N tokens")
    p.add_argument("--shape", default="qwen3-0.6b")
    p.add_argument("--quant", default="q8_0")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--depth", type=int, default=0, help="tokens in the cache before the measured ones")
    p.add_argument("--repetitions", type=int, default=1, help="per run of a program")
    p.add_argument("--minfer", default="target/release/minfer", help="our program")
    p.add_argument("--llama", help="llama-bench (default: of --peers)")
    p.add_argument("--model", help="the peer's model file (default: --peers/models/SHAPE-rand-QUANT.gguf)")
    p.add_argument("--max-foreign", type=float, default=8.0)
    args = p.parse_args()
    for test in args.tests.split(","):
        measure(test, args)


if __name__ == "__main__":
    main()
