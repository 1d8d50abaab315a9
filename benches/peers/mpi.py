"""Compares `--library mpi` and `--transport mpi` with plain C over the same MPI, alternating, on two ranks.

    python3 benches/peers/mpi.py --paceline target/release/paceline [--mpirun mpirun] [--mpicc mpicc] [--rounds 7]

all_reduce of f32: MPI_Allreduce, and MPI_Iallreduce with MPI_Test, in C beside the MPI_Iallreduce that Paceline
calls. Vectors of both lie on huge pages, C's with --small-pages on small ones. Message: MPI_Send and MPI_Recv in C beside a broadcast among two ranks by Paceline's steps. Prints medians, and
the median over the rounds of plain C's time as a part of Paceline's.
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
parser.add_argument("--budget", default="200", help="milliseconds for each size")
parser.add_argument("--small-pages", action="store_true", help="malloc in C")
options = parser.parse_args()


def lines(*command):
    run = subprocess.run([*options.mpirun.split(), "-n", "2", *command], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def in_c(binary):
    found = (line.split() for line in lines(binary, options.budget, *map(str, SIZES)))
    return {int(size): float(time) for size, time in found}


def ours(*flags):
    sizes = ",".join(map(str, SIZES))
    command = [options.paceline, "bench", "collectives", "--json", "--budget", options.budget, "--sizes", sizes, *flags]
    found = map(json.loads, lines(*command))
    return {record["bytes"]: record["median_us"] for record in found}


ALL_REDUCE = ["--op", "all_reduce", "--library", "mpi"]
MESSAGE = ["--op", "broadcast", "--transport", "mpi", "--algorithm", "direct"]

with tempfile.TemporaryDirectory() as scratch:
    for name, source, defined, flags in [
        ("MPI_Allreduce", "all_reduce_mpi.c", [], ALL_REDUCE),
        ("MPI_Iallreduce", "all_reduce_mpi.c", ["-DNONBLOCKING"], ALL_REDUCE),
        ("MPI_Send", "message_mpi.c", [], MESSAGE),
    ]:
        binary = os.path.join(scratch, name)
        pages = [] if options.small_pages else ["-DHUGE_PAGES"]
        subprocess.run([options.mpicc, "-O2", *pages, *defined, os.path.join(HERE, source), "-o", binary], check=True)
        rounds = [(in_c(binary), ours(*flags)) for _ in range(options.rounds)]
        for size in SIZES:
            plain = statistics.median(c[size] for c, _ in rounds)
            own = statistics.median(o[size] for _, o in rounds)
            ratio = statistics.median(c[size] / o[size] for c, o in rounds)
            print(f"{name:>15} {size:>9} bytes: C {plain:9.1f} us, paceline {own:9.1f} us, {ratio:6.1%}")
