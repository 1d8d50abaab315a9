#!/usr/bin/env python3
"""Two data-parallel ranks of one thread each: Paceline beside PyTorch's DDP over Gloo, in turns.

A round runs Paceline on two ranks, DDP on two ranks, and Paceline on one rank with the batch of one,
alone and twice at once, each once, so that a machine that is slow for a while is slow for all; ratios are taken within rounds
and the median of the rounds is printed. `over_ddp` above 1: Paceline is faster. `weak_scaling` is the
time of one rank over that of two, each rank with the same batch: 1 is perfect. `apart` is that of one
rank over two jobs of one rank each that run at once and know nothing of each other: what the machine's
cores leave each other, and the most that two ranks can reach there.

    python3 benches/peers/ddp.py --paceline target/release/paceline

The interpreter that has PyTorch is taken from --python or the variable PYTHON. Models and batches are
those of train.py. One rank is kept to one core, as each of two is, with the other core idle.
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
    """The median seconds of an iteration, of the slower of some jobs that run at once."""
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
    """The same of DDP."""
    model, batch, seq, iterations = case
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        given.python, str(HERE / "train_pytorch.py"), "--distributed", "--model", str(model),
        "--batch", str(batch), "--seq", str(seq), "--threads", "1", "--warmup", str(WARMUP),
        "--iterations", str(iterations),
    ]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [
        start(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(RANKS)
    ]
    outs = [finish(process, f"DDP's rank {rank}") for rank, process in enumerate(ranks)]
    return statistics.median(json.loads(outs[0].splitlines()[-1])["iteration_s"])


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--paceline", default="target/release/paceline")
    arguments.add_argument("--python", default=os.environ.get("PYTHON", sys.executable))
    arguments.add_argument("--cases", default="a,b")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--flags", default="", help="more flags for paceline train")
    given = arguments.parse_args()
    for name in given.cases.split(","):
        case, rows = CASES[name], []
        for _ in range(given.rounds):
            two, other = paceline(given, case, RANKS), ddp(given, case)
            one, apart = paceline(given, case, 1), paceline(given, case, 1, jobs=RANKS)
            row = {
                "paceline_s": two, "ddp_s": other, "one_rank_s": one, "apart_s": apart,
                "over_ddp": other / two, "weak_scaling": one / two, "apart": one / apart,
            }
            rows.append(row)
            print(f"  {name}: {json.dumps(row)}", file=sys.stderr)
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        medians["tokens_per_s"] = RANKS * case[1] * case[2] / medians["paceline_s"]
        print(json.dumps({"case": name, "ranks": RANKS, "rounds": len(rows), **medians}))


if __name__ == "__main__":
    main()
