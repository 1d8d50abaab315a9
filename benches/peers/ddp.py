#!/usr/bin/env python3
"""Compares Paceline with PyTorch's DDP over Gloo: two data-parallel ranks of one thread each.

A round runs, once each: Paceline on two ranks, DDP on two ranks, Paceline on one rank, and two independent
one-rank jobs of Paceline at once. Ratios are taken within rounds, so slow phases of the machine cancel; the
median of the rounds is printed.

    over_ddp          time of DDP over Paceline; above 1 Paceline is faster
    weak_scaling      time of one rank over that of two with the same batch per rank; 1 is ideal
    independent_jobs  time of one job over that of two independent jobs at once: the contention of the
                      machine's cores, and the upper bound of weak_scaling

    python3 benches/peers/ddp.py --paceline target/release/paceline

--python or the variable PYTHON names the interpreter that has PyTorch. Models and batches are those of
train.py. A single rank is pinned to one core, like each of two ranks; the other core is idle.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile

from train import CASES, HERE, WARMUP

RANKS = 2


def finish(process, name):
    out, err = process.communicate()
    if process.returncode != 0:
        sys.exit(f"{name} failed:\n{err}")
    return out


def start(command, **more):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def paceline(given, case, ranks, jobs=1):
    """Median iteration time in seconds of the slowest of `jobs` concurrent jobs."""
    model, batch, seq, iterations = case
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        running = []
        for job in range(jobs):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            command = [
                given.paceline, "train", "--json", "--model", str(model), "--dp", str(ranks),
                "--global-batch", str(ranks * batch), "--micro-batch", str(batch), "--seq", str(seq),
                "--threads-per-rank", "1", "--iterations", str(WARMUP + iterations), "--out", folder,
                *given.flags.split(),
            ]
            if ranks == 1:
                command = ["taskset", "-c", str(cores[job % len(cores)]), *command]
            running.append(start(command))
        outs = [finish(process, "paceline") for process in running]
    medians = []
    for out in outs:
        lines = [json.loads(line) for line in out.splitlines()]
        seconds = [line["iteration_s"] for line in lines if line["event"] == "iteration"]
        medians.append(statistics.median(seconds[WARMUP:]))
    return max(medians)


def ddp(given, case):
    """Median iteration time in seconds of DDP."""
    model, batch, seq, iterations = case
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        given.python, str(HERE / "train_pytorch.py"), "--distributed", "--model", str(model),
        "--batch", str(batch), "--seq", str(seq), "--threads", "1", "--warmup", str(WARMUP),
        "--iterations", str(iterations),
    ]
    rank_env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [
        start(command, env={**os.environ, **rank_env, "RANK": str(rank)}) for rank in range(RANKS)
    ]
    outs = [finish(process, f"DDP's rank {rank}") for rank, process in enumerate(ranks)]
    return statistics.median(json.loads(outs[0].splitlines()[-1])["iteration_s"])


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--paceline", default="target/release/paceline")
    arguments.add_argument("--python", default=os.environ.get("PYTHON", sys.executable))
    arguments.add_argument("--cases", default="a,b")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--flags", default="", help="additional flags for paceline train")
    given = arguments.parse_args()
    for name in given.cases.split(","):
        case, rows = CASES[name], []
        for _ in range(given.rounds):
            two, other = paceline(given, case, RANKS), ddp(given, case)
            one, independent = paceline(given, case, 1), paceline(given, case, 1, jobs=RANKS)
            row = {
                "paceline_s": two, "ddp_s": other, "one_rank_s": one, "independent_jobs_s": independent,
                "over_ddp": other / two, "weak_scaling": one / two, "independent_jobs": one / independent,
            }
            rows.append(row)
            print(f"  {name}: {json.dumps(row)}", file=sys.stderr)
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        medians["tokens_per_s"] = RANKS * case[1] * case[2] / medians["paceline_s"]
        print(json.dumps({"case": name, "ranks": RANKS, "rounds": len(rows), **medians}))


if __name__ == "__main__":
    main()
