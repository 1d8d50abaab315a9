#!/usr/bin/env python3
"""Compares training speed and memory of Paceline and PyTorch on the same model, in alternating runs.

A round runs Paceline, PyTorch eager and (unless --no-compile) torch.compile once each. Ratios are taken
within rounds, so slow phases of the machine cancel; the median of the rounds is printed. Above 1, Paceline
is faster. Memory is the peak resident size minus 16 bytes per parameter, the weights, gradients and two
AdamW moments that both need.

    python3 benches/peers/train.py --paceline target/release/paceline

--python or the variable PYTHON names the interpreter that has PyTorch.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
MODELS = HERE.parent.parent / "models"
# Name: model file, samples per batch, tokens per sample, measured iterations per round.
CASES = {
    "a": (HERE / "train-a.toml", 4, 256, 8),
    "b": (MODELS / "gpt2-124m.toml", 2, 256, 3),
}
WARMUP = 2


def paceline(given, case, threads, dtype):
    """Median iteration time in seconds, and peak resident bytes."""
    model, batch, seq, iterations = case
    command = [
        given.paceline, "train", "--json", "--model", str(model), "--global-batch", str(batch),
        "--micro-batch", str(batch), "--seq", str(seq), "--threads-per-rank", str(threads), "--dtype", dtype,
        "--iterations", str(WARMUP + iterations), "--out", os.environ.get("TMPDIR", "/tmp") + "/peer",
    ]
    lines = [json.loads(line) for line in run(command, given.under).splitlines()]
    seconds = [line["iteration_s"] for line in lines if line["event"] == "iteration"][WARMUP:]
    return statistics.median(seconds), sum(lines[-1]["peak_bytes"])


def pytorch(given, case, threads, extra):
    model, batch, seq, iterations = case
    command = [
        given.python, str(HERE / "train_pytorch.py"), "--model", str(model), "--batch", str(batch),
        "--seq", str(seq), "--threads", str(threads), "--warmup", str(WARMUP),
        "--iterations", str(iterations), *extra,
    ]
    result = json.loads(run(command, given.under).splitlines()[-1])
    return statistics.median(result["iteration_s"]), result["peak_bytes"], result["parameters"]


def run(command, under):
    command = [*under.split(), *command]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def compare(name, threads, given):
    case = CASES[name]
    rows = []
    for _ in range(given.rounds):
        extra = ["--bf16"] if given.dtype == "bf16" else []
        ours, our_bytes = paceline(given, case, threads, given.dtype)
        eager, eager_bytes, parameters = pytorch(given, case, threads, extra)
        row = {
            "paceline_s": ours,
            "eager_s": eager,
            "over_eager": eager / ours,
            "memory_share": (our_bytes - 16 * parameters) / (eager_bytes - 16 * parameters),
        }
        if given.dtype != "f32":
            row["f32_s"] = paceline(given, case, threads, "f32")[0]
            row["share_of_f32"] = ours / row["f32_s"]
        if not given.no_compile:
            row["compile_s"] = pytorch(given, case, threads, [*extra, "--compile"])[0]
            row["over_compile"] = row["compile_s"] / ours
        rows.append(row)
        print(f"  {name}, {threads} threads: {json.dumps(row)}", file=sys.stderr)
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    tokens = case[1] * case[2]
    medians["tokens_per_s"] = tokens / medians["paceline_s"]
    print(json.dumps({"case": name, "dtype": given.dtype, "threads": threads, "rounds": len(rows), **medians}))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--paceline", default="target/release/paceline")
    arguments.add_argument("--python", default=os.environ.get("PYTHON", sys.executable))
    arguments.add_argument("--cases", default="a,b")
    arguments.add_argument("--threads", default="1,2")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--under", default="", help="prefix of each command, such as 'nice -n -19'")
    arguments.add_argument("--dtype", default="f32", choices=["f32", "bf16"],
                           help="bf16: beside PyTorch's autocast, and beside Paceline in f32")
    arguments.add_argument("--no-compile", action="store_true")
    given = arguments.parse_args()
    for name in given.cases.split(","):
        for threads in given.threads.split(","):
            compare(name, int(threads), given)


if __name__ == "__main__":
    main()
