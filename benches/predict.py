#!/usr/bin/env python3
"""Trains small models in many layouts and prints the error of the predicted iteration times.

usage: predict.py PACELINE CLUSTER.toml [--iterations N] [--only TEXT] [--repeat N] [--transport NAME]

PACELINE is the built program, CLUSTER.toml the file that `paceline calibrate` wrote on this machine.
Each row is one `paceline train --json`, whose prediction is made before training starts. Nothing is
fitted.

A hypervisor may migrate the virtual cores. A row is repeated if the core round trip before or after it
(`paceline bench core-to-core`) differs from that of the calibration; the number of repetitions is printed.
"""

import argparse
import json
import math
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


# Largest factor between the core round trips of calibration and run, and attempts per run.
MAX_DRIFT = 1.6
TRIES = 10


def core_round_trip(program):
    """Current core round trip in seconds; None on a single core."""
    done = subprocess.run([program, "bench", "core-to-core", "--rounds", "1", "--json"], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["core_round_trip_s"] if done.returncode == 0 else None


def run_unmigrated(repeated, calibrated, program, *rest):
    """Runs, at most TRIES times, until the core round trip equals that of the calibration.

    Appends every run with migrated cores to `repeated`; after TRIES such runs the last one is used.
    """
    def migrated():
        now = core_round_trip(program) if calibrated else None
        return now is not None and not 1 / MAX_DRIFT <= now / calibrated <= MAX_DRIFT

    for _ in range(TRIES):
        before = migrated()
        result = run(program, *rest)
        if not before and not migrated():
            break
        repeated.append(rest)
    return result


# Exposed communication below this share of an iteration is noise; its error is given relative to the iteration.
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
              f"90th percentile {errors[math.ceil(0.9 * len(errors)) - 1] * 100:.1f} %, worst {errors[-1] * 100:.1f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("cluster")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--only", default="", help="run only rows that contain this text")
    parser.add_argument("--repeat", type=int, default=1, help="runs per row; medians are used")
    parser.add_argument("--transport", help="run only rows with communication, over this transport (tcp: loopback device)")
    given = parser.parse_args()
    errors, all_exposed, exposures, small, repeated = [], [], [], [], []
    calibrated = tomllib.loads(Path(given.cluster).read_text()).get("measured", {}).get("core_round_trip")
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
            runs = [run_unmigrated(repeated, calibrated, given.program, given.cluster, named, flags, given.iterations, folder)
                    for _ in range(given.repeat)]
            iteration, exposed = (tuple(statistics.median(run[part][side] for run in runs) for side in (0, 1))
                                  for part in (0, 1))
            errors.append(abs(error(iteration)))
            if exposed[1]:
                all_exposed.append(abs(error(exposed)))
            if exposed[1] > SHARE * iteration[1]:
                exposures.append(abs(error(exposed)))
            elif exposed[1]:
                small.append(abs(exposed[0] - exposed[1]) / iteration[1])
            print(f"{row(iteration)} {row(exposed)}  {model} {flags}", flush=True)
    print(f"{len(repeated)} runs with migrated cores")
    summary("iterations", errors)
    summary("exposed communication", all_exposed)
    summary(f"exposed communication of more than {SHARE:.0%} of an iteration", exposures)
    summary("less than that, relative to the iteration", small)


if __name__ == "__main__":
    sys.exit(main())
