"""Compares `--library mpi` and `--transport mpi` with plain C over the same MPI, alternating, on two ranks.

    python3 benches/peers/mpi.py --paceline target/release/paceline [--mpirun mpirun] [--mpicc mpicc] [--rounds 7]

all_reduce of f32: MPI_Allreduce in C beside MPI_Iallreduce called by Paceline. Message: MPI_Send and MPI_Recv in C
beside a broadcast among two ranks by Paceline's steps. Prints the medians and how much of plain C's speed is left.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = [1 << 20, 4 << 20, 16 << 20]

parser = argparse.ArgumentParser()
parser.add_argument("--paceline", required=True)
parser.add_argument("--mpirun", default="mpirun")
parser.add_argument("--mpicc", default="mpicc")
parser.add_argument("--rounds", type=int, default=7)
options = parser.parse_args()
BUDGET = "200"


def lines(*command):
    run = subprocess.run([*options.mpirun.split(), "-n", "2", *command], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def in_c(binary):
    found = (line.split() for line in lines(binary, BUDGET, *map(str, SIZES)))
    return {int(size): float(time) for size, time in found}


def ours(*flags):
    sizes = ",".join(map(str, SIZES))
    command = [options.paceline, "bench", "collectives", "--json", "--budget", BUDGET, "--sizes", sizes, *flags]
    found = map(json.loads, lines(*command))
    return {record["bytes"]: record["median_us"] for record in found}


with tempfile.TemporaryDirectory() as scratch:
    for name, flags in [
        ("all_reduce_mpi", ["--op", "all_reduce", "--library", "mpi"]),
        ("message_mpi", ["--op", "broadcast", "--transport", "mpi", "--algorithm", "direct"]),
    ]:
        binary = os.path.join(scratch, name)
        subprocess.run([options.mpicc, "-O2", os.path.join(HERE, name + ".c"), "-o", binary], check=True)
        rounds = [(in_c(binary), ours(*flags)) for _ in range(options.rounds)]
        for size in SIZES:
            plain = statistics.median(c[size] for c, _ in rounds)
            own = statistics.median(o[size] for _, o in rounds)
            print(f"{name:>15} {size:>9} bytes: C {plain:9.1f} us, paceline {own:9.1f} us, {plain / own:6.1%}")
