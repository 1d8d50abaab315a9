"""Compares all_reduce with OpenMPI and Gloo, in alternating runs.

    cargo build --release && python3 benches/peers/collectives.py [--ranks 2,4,8] [--sizes 1MiB,16MiB,128MiB]

Needs mpicc and mpirun on the PATH, and a Python with torch in PACELINE_TORCH_PYTHON (default: this one);
missing libraries are skipped with a message. Contenders run in turn, --rounds times each, and the best
median of each is used, which removes disturbances. Paceline's vectors are in shared memory, as in
training; `shm, private` uses private memory, as MPI does.

The limit is the bandwidth of memory or caches: an all_reduce of P ranks must read and write P vectors once.
It is measured in the same run by copies on all cores at once, with the working set of the P vectors. Below
1 MiB synchronisation dominates, and no limit is printed.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_size(text):
    for unit, scale in UNITS.items():
        if text.endswith(unit):
            return int(text[: -len(unit)]) * scale
    return int(text)


def ours(program, transport, budget, extra=()):
    def run(ranks, sizes):
        command = [program, "bench", "collectives", "--json", "--ranks", str(ranks)]
        command += ["--transport", transport, "--budget", str(budget)]
        command += ["--sizes", ",".join(map(str, sizes)), *extra]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        records = [json.loads(line) for line in lines]
        if any(record["wrong"] for record in records):
            sys.exit("wrong results")
        best = {}
        for record in records:
            best[record["bytes"]] = min(best.get(record["bytes"], 1e18), record["median_us"])
        return best

    return run


def plain(command):
    def run(ranks, sizes):
        full = command(ranks) + [str(size) for size in sizes]
        text = subprocess.run(full, check=True, capture_output=True, text=True).stdout
        pairs = (line.split() for line in text.splitlines() if line[:1].isdigit())
        return {int(size): float(micros) for size, micros in pairs}

    return run


def copy(size, barrier, results):
    """Copies `size` bytes repeatedly and reports the bandwidth of the fastest copy in GB/s."""
    data = memoryview(bytearray(b"\1" * size))
    source = memoryview(bytearray(b"\1" * size))
    copies = max(5, min(2000, (256 << 20) // size))
    barrier.wait()
    best = 1e18
    for _ in range(copies):
        start = time.perf_counter()
        data[:] = source
        best = min(best, time.perf_counter() - start)
    results.put(2 * size / best / 1e9)


def copy_rate(total):
    """Copy bandwidth of all cores at once in GB/s, reads plus writes, with a working set of `total` bytes."""
    cores = os.cpu_count() or 1
    barrier, results = multiprocessing.Barrier(cores), multiprocessing.Queue()
    size = max(total // (2 * cores), 4096)
    copiers = [
        multiprocessing.Process(target=copy, args=(size, barrier, results)) for _ in range(cores)
    ]
    for copier in copiers:
        copier.start()
    rate = sum(results.get() for _ in copiers)
    for copier in copiers:
        copier.join()
    return rate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.path.join(HERE, "../../target/release/paceline"))
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--sizes", default="4KiB,64KiB,1MiB,16MiB,128MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=200, help="milliseconds per size")
    arguments = parser.parse_args()
    sizes = [parse_size(size) for size in arguments.sizes.split(",")]
    budget, program = arguments.budget, arguments.program
    contenders = {
        "shm": ours(program, "shm", budget),
        "shm, private": ours(program, "shm", budget, ["--private"]),
        "tcp": ours(program, "tcp", budget),
    }
    scratch = tempfile.TemporaryDirectory()
    if shutil.which("mpicc") and shutil.which("mpirun"):
        binary = os.path.join(scratch.name, "all_reduce_mpi")
        subprocess.run(["mpicc", "-O2", os.path.join(HERE, "all_reduce_mpi.c"), "-o", binary], check=True)
        mpirun = ["mpirun", "--oversubscribe"]
        if os.geteuid() == 0:
            mpirun.append("--allow-run-as-root")
        tail = lambda ranks: ["-np", str(ranks), binary, str(budget)]
        contenders["OpenMPI shm"] = plain(lambda ranks: mpirun + tail(ranks))
        contenders["OpenMPI tcp"] = plain(lambda ranks: mpirun + ["--mca", "btl", "tcp,self"] + tail(ranks))
    else:
        print("no mpicc or mpirun: OpenMPI is skipped")
    torch = os.environ.get("PACELINE_TORCH_PYTHON", sys.executable)
    if subprocess.run([torch, "-c", "import torch"], capture_output=True).returncode == 0:
        script = os.path.join(HERE, "all_reduce_gloo.py")
        contenders["Gloo"] = plain(lambda ranks: [torch, script, str(ranks), str(budget)])
    else:
        print("no torch in PACELINE_TORCH_PYTHON: Gloo is skipped")
    columns = list(contenders)
    ratios = [("shm", "OpenMPI shm"), ("shm, private", "OpenMPI shm"), ("tcp", "OpenMPI tcp"), ("tcp", "Gloo")]
    ratios = [pair for pair in ratios if pair[1] in contenders]
    print(f"{'ranks':>5} {'bytes':>10}", *(f"{name:>13}" for name in columns), "  median µs of the best round")
    for ranks in map(int, arguments.ranks.split(",")):
        best = {name: {} for name in columns}
        for _ in range(arguments.rounds):
            for name, run in contenders.items():
                for size, micros in run(ranks, sizes).items():
                    best[name][size] = min(best[name].get(size, 1e18), micros)
        for size in sizes:
            print(f"{ranks:>5} {size:>10}", *(f"{best[name][size]:>13.2f}" for name in columns))
        for size in sizes:
            words = [f"{a} / {b} {best[b][size] / best[a][size]:.2f}" for a, b in ratios]
            if size >= 1 << 20:
                rate = max(copy_rate(ranks * size) for _ in range(2))
                limit = 2 * ranks * size / (rate * 1e9) * 1e6
                words.append(f"shm at {limit / best['shm'][size] * 100:.0f} % of the copy limit of {rate:.0f} GB/s")
            print(f"{ranks:>5} {size:>10}  times faster: " + ", ".join(words))


if __name__ == "__main__":
    main()
