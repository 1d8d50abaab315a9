#!/usr/bin/env python3
"""Predicted beside measured: trains a matrix of small layouts for real and prints the errors.

usage: predict.py PACELINE CLUSTER.toml [--iterations N] [--only TEXT] [--repeat N] [--transport NAME]

PACELINE is the built program, CLUSTER.toml what `paceline calibrate` wrote on this machine. Each
row is one `paceline train --json`; its prediction is made before it starts. Nothing here is fitted.

A virtual machine's host moves its cores. A row before or after which they are not as far apart as they
were when the machine was calibrated (`paceline bench cores`) is run again; how often is told.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

WIDE = 'kind = "gpt2"\nlayers = 4\nd_model = 256\nheads = 4\nffn = 1024\nseq = 128\nvocab = 1024\ntied = true\n'
LARGE = 'kind = "llama"\nlayers = 4\nd_model = 512\nheads = 8\nkv_heads = 4\nffn = 1408\nseq = 128\nvocab = 2048\ntied = false\n'
DEEP = 'kind = "gpt2"\nlayers = 12\nd_model = 96\nheads = 3\nffn = 384\nseq = 64\nvocab = 512\ntied = false\n'

ROWS = [
    ("mini", "--threads-per-rank 1 --global-batch 8 --micro-batch 4"),
    ("mini", "--global-batch 8 --micro-batch 4"),
    ("mini-llama", "--threads-per-rank 1 --global-batch 8 --micro-batch 8"),
    ("wide", "--threads-per-rank 1 --global-batch 8 --micro-batch 4"),
    ("wide", "--threads-per-rank 1 --global-batch 8 --micro-batch 4 --recompute full"),
    ("large", "--threads-per-rank 1 --global-batch 4 --micro-batch 2"),
    ("large", "--global-batch 4 --micro-batch 2"),
    ("deep", "--threads-per-rank 1 --global-batch 16 --micro-batch 4"),
    ("mini", "--dp 2 --global-batch 16 --micro-batch 4"),
    ("mini", "--dp 2 --global-batch 16 --micro-batch 4 --transport thread"),
    ("mini", "--dp 2 --global-batch 16 --micro-batch 4 --transport tcp"),
    ("mini", "--dp 2 --zero 1 --global-batch 16 --micro-batch 4"),
    ("mini", "--dp 2 --zero 3 --global-batch 16 --micro-batch 4"),
    ("mini", "--dp 2 --global-batch 16 --micro-batch 4 --no-overlap"),
    ("mini", "--tp 2 --global-batch 8 --micro-batch 4"),
    ("mini-llama", "--tp 2 --sp --global-batch 8 --micro-batch 4"),
    ("mini", "--pp 2 --global-batch 16 --micro-batch 2"),
    ("mini", "--pp 2 --schedule gpipe --global-batch 16 --micro-batch 2"),
    ("wide", "--dp 2 --global-batch 8 --micro-batch 4"),
    ("wide", "--dp 2 --zero 2 --global-batch 8 --micro-batch 2"),
    ("wide", "--tp 2 --global-batch 8 --micro-batch 4 --recompute selective"),
    ("wide", "--pp 2 --global-batch 16 --micro-batch 2"),
    ("large", "--dp 2 --global-batch 4 --micro-batch 2"),
    ("large", "--tp 2 --global-batch 4 --micro-batch 2"),
    ("large", "--pp 2 --global-batch 8 --micro-batch 1"),
    ("large", "--dp 2 --zero 3 --global-batch 4 --micro-batch 2"),
    ("deep", "--dp 2 --global-batch 16 --micro-batch 4"),
    ("deep", "--pp 2 --global-batch 16 --micro-batch 2 --recompute full"),
    ("mini", "--dp 4 --global-batch 16 --micro-batch 4"),
    ("mini", "--dp 2 --tp 2 --global-batch 16 --micro-batch 4"),
    ("wide", "--pp 4 --global-batch 16 --micro-batch 2"),
    ("wide", "--dp 2 --pp 2 --zero 1 --global-batch 16 --micro-batch 2"),
]


def run(program, cluster, model, flags, iterations, folder):
    command = [program, "train", "--model", model, *flags.split(), "--cluster", cluster]
    command += ["--iterations", str(iterations), "--json", "--out", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    last = [line for line in lines if line.get("event") == "done"]
    if not last:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    done = last[0]
    iteration = (done["predicted_iteration_s"], done["measured_iteration_s"])
    return iteration, (done["predicted_exposed_s"] or 0.0, done["measured_exposed_s"] or 0.0)


# Cores that are so many times as near or as far as they were are elsewhere, and how often to try again.
ELSEWHERE = 1.6
TRIES = 10


def apart(program):
    """How long a word takes from one core to another and back, now; none on a single core."""
    done = subprocess.run([program, "bench", "cores", "--rounds", "1", "--json"], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["apart_s"] if done.returncode == 0 else None


def run_alike(again, calibrated, program, *rest):
    """A run with the cores as far from each other as they were; `again` gets those that were not."""
    def elsewhere():
        now = apart(program) if calibrated else None
        return now is not None and not 1 / ELSEWHERE <= now / calibrated <= ELSEWHERE

    for _ in range(TRIES):
        before = elsewhere()
        seen = run(program, *rest)
        if not before and not elsewhere():
            break
        again.append(rest)
    return seen


# Exposed communication below this share of an iteration is judged by what it does to the iteration: in
# itself it is noise.
SHARE = 0.02
HEAD = f"{'predicted':>10} {'measured':>10} {'error':>9} {'exposed':>10} {'measured':>10} {'error':>9}  ms"


def error(pair):
    predicted, measured = pair
    return (predicted - measured) / measured if measured else 0.0


def row(pair):
    return f"{pair[0] * 1e3:10.2f} {pair[1] * 1e3:10.2f} {error(pair) * 100:+7.1f} %"


def summary(what, errors):
    errors.sort()
    if errors:
        print(f"{what}, {len(errors)} rows: median error {statistics.median(errors) * 100:.1f} %, "
              f"90th percentile {errors[int(0.9 * (len(errors) - 1))] * 100:.1f} %, worst {errors[-1] * 100:.1f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("cluster")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--only", default="", help="rows whose text contains this")
    parser.add_argument("--repeat", type=int, default=1, help="runs of a row; their medians count")
    parser.add_argument("--transport", help="rows that exchange something, over this one: tcp is the loopback device")
    given = parser.parse_args()
    errors, all_exposed, exposures, little, again = [], [], [], [], []
    calibrated = tomllib.loads(Path(given.cluster).read_text()).get("measured", {}).get("apart")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"wide": WIDE, "large": LARGE, "deep": DEEP}
        for model, text in models.items():
            (folder / f"{model}.toml").write_text(text)
        print(HEAD, flush=True)
        for model, flags in ROWS:
            if given.transport:
                if "--transport" in flags or not any(word in flags for word in ("--dp", "--tp", "--pp")):
                    continue
                flags += f" --transport {given.transport}"
            if given.only not in f"{model} {flags}":
                continue
            named = str(folder / f"{model}.toml") if model in models else model
            runs = [run_alike(again, calibrated, given.program, given.cluster, named, flags, given.iterations, folder)
                    for _ in range(given.repeat)]
            iteration, exposed = (tuple(statistics.median(run[part][side] for run in runs) for side in (0, 1))
                                  for part in (0, 1))
            errors.append(abs(error(iteration)))
            if exposed[1]:
                all_exposed.append(abs(error(exposed)))
            if exposed[1] > SHARE * iteration[1]:
                exposures.append(abs(error(exposed)))
            elif exposed[1]:
                little.append(abs(exposed[0] - exposed[1]) / iteration[1])
            print(f"{row(iteration)} {row(exposed)}  {model} {flags}", flush=True)
    print(f"{len(again)} runs with the cores elsewhere, which do not count")
    summary("iterations", errors)
    summary("exposed communication", all_exposed)
    summary(f"exposed communication of more than {SHARE:.0%} of an iteration", exposures)
    summary("less than that, in shares of an iteration", little)


if __name__ == "__main__":
    sys.exit(main())
