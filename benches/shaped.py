#!/usr/bin/env python3
"""Trains two ranks over a rate-limited link, with and without overlap, and prints prediction errors.

usage: shaped.py PACELINE [--rate 1gbit] [--cluster CALIBRATED.toml] [--flags "…"] [--only TEXT]

Each rank has its own network namespace and core. A veth pair with a token bucket at both ends (`tc tbf`)
joins them. An idle link sends a full bucket at once, unlike a wire, so the bucket is small. It still holds
the largest packet of TCP (64 KiB): larger packets would be segmented by the computing core, work that a
NIC offloads. Root is required.

With a file of `paceline calibrate` for this machine, predictions are made for two hosts of one core each,
joined by a link of the given rate minus frame headers, with the latency measured through a socket.
Nothing is fitted. The last lines are the speedups by compression over uncompressed gradients.
"""

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from predict import DEEP, HEAD, LARGE, SHARE, WIDE, row, error, summary

HOSTS = ("paceline-a", "paceline-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29577"

ROWS = [
    ("large", "--dp 2 --global-batch 4 --micro-batch 2"),
    ("large", "--dp 2 --zero 1 --global-batch 4 --micro-batch 2"),
    ("large", "--dp 2 --zero 3 --global-batch 4 --micro-batch 2"),
    ("large", "--dp 2 --global-batch 16 --micro-batch 4 --bucket-mib 4"),
    ("large", "--pp 2 --global-batch 8 --micro-batch 1"),
    ("wide", "--dp 2 --global-batch 16 --micro-batch 8 --bucket-mib 2"),
    ("wide", "--tp 2 --global-batch 8 --micro-batch 4"),
] + [
    ("large", f"--dp 2 --global-batch 8 --micro-batch 4 --bucket-mib 4 --optimizer momentum --compress {how}")
    for how in ("none", "int8", "onebit", "topk:0.01", "powersgd:4")
]


def sh(command):
    subprocess.run(command.split(), check=True, capture_output=True)


def create_link(rate):
    remove_link()
    for host in HOSTS:
        sh(f"ip netns add {host}")
    sh(f"ip link add veth-a netns {HOSTS[0]} type veth peer name veth-b netns {HOSTS[1]}")
    for host, end, address in zip(HOSTS, ("veth-a", "veth-b"), ADDRESSES):
        run = f"ip netns exec {host}"
        sh(f"{run} ip addr add {address}/24 dev {end}")
        sh(f"{run} ip link set {end} up")
        sh(f"{run} ip link set lo up")
        sh(f"{run} tc qdisc add dev {end} root tbf rate {rate} burst 72kb latency 100ms")


def remove_link():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def two_hosts(calibrated, rate, folder):
    """Writes the cluster file of this setup, derived from that of one host, and returns its path."""
    described = tomllib.loads(calibrated)
    tcp = next(table for table in described["measured"]["transport"] if table["name"] == "tcp")
    latency = min(message["warm"] for message in tcp["messages"])
    payload = 1448 / 1514  # payload of an Ethernet frame with IPv4 and TCP timestamps
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    number = rate.rstrip("kmgbit")
    speed = float(number) * units[rate[len(number):]] / 8 * payload
    link = f'''
[[dimension]]
name = "link"
kind = "switch"
size = 2
latency = "{latency * 1e6} us"
bandwidth = "{speed / 1e6} MB/s"
efficiency = 1.0
devices_per_link = 1
'''
    text = calibrated.replace("\nhosts = 1\n", "\nhosts = 2\n").replace("\ncores = 2\n", "\ncores = 1\n")
    text = text.replace("\nsize = 64\n", "\nsize = 1\n")
    # Both hosts are one machine, whose ranks always share caches and memory: `all_cores` applies throughout.
    text = re.sub(r"solo = (\[[^]]*\]|[^,]*), all_cores = (\[[^]]*\]|[^ ,}]*)", r"solo = \2, all_cores = \2", text)
    at = text.index("\n# Times are in seconds")
    path = folder / "two-hosts.toml"
    path.write_text(text[:at] + link + text[at:])
    return str(path)


def train(given, model, flags, folder):
    """Returns (predicted, measured) pairs of iteration time, without the first two, and exposed communication."""
    secret = secrets.token_hex(16)
    ranks = []
    cores = sorted(os.sched_getaffinity(0))
    for rank, (host, address) in enumerate(zip(HOSTS, ADDRESSES)):
        rank_env = {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT,
            "PACELINE_SECRET": secret,
        }
        command = [
            "ip", "netns", "exec", host, "taskset", "-c", str(cores[rank % len(cores)]),
            given.program, "train", "--launch", "env", "--bind", address, "--transport", "tcp",
            "--model", model, *flags.split(), *given.flags.split(), "--threads-per-rank", "1",
            "--iterations", str(given.iterations), "--json", "--out", str(folder / f"run-{rank}"),
        ]
        if given.cluster:
            command += ["--cluster", given.cluster]
        environment = {**os.environ, **rank_env}
        ranks.append(subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    ends = [process.communicate() for process in ranks]
    lines = [json.loads(line) for line in ends[0][0].splitlines()]
    done = [line for line in lines if line.get("event") == "done"]
    if not done:
        sys.exit("\n".join(err for _, err in ends))
    times = [line["iteration_s"] for line in lines if line.get("event") == "iteration"]
    iteration = (done[0]["predicted_iteration_s"], statistics.median(times[2:]))
    return iteration, (done[0]["predicted_exposed_s"], done[0]["measured_exposed_s"])


def print_speedups(times):
    """Prints the speedups by compression, from predicted and measured iteration times by flags."""
    for flags, compressed in times.items():
        rest, _, how = flags.partition("--compress ")
        how, _, more = how.partition(" ")
        plain = times.get(f"{rest}--compress none" + (f" {more}" if more else ""))
        if how and how != "none" and plain:
            predicted, measured = (a / b for a, b in zip(plain, compressed))
            deviation = f"{100 * (predicted / measured - 1):+.1f} %"
            print(f"speedup of {how} {more}: predicted {predicted:.2f}, measured {measured:.2f}, {deviation}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--cluster", default="")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--flags", default="", help="additional flags for every row")
    parser.add_argument("--only", default="", help="run only rows that contain this text")
    given = parser.parse_args()
    errors, exposures, times = [], [], {}
    create_link(given.rate)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for model, text in {"wide": WIDE, "large": LARGE, "deep": DEEP}.items():
                (folder / f"{model}.toml").write_text(text)
            if given.cluster:
                given.cluster = two_hosts(Path(given.cluster).read_text(), given.rate, folder)
            print(HEAD, flush=True)
            for model, flags in ROWS:
                if given.only not in f"{model} {flags}":
                    continue
                for more in ("", " --no-overlap"):
                    path = str(folder / f"{model}.toml")
                    iteration, exposed = train(given, path, flags + more, folder)
                    errors.append(abs(error(iteration)))
                    times[flags + more] = iteration
                    if exposed[1] > SHARE * iteration[1]:
                        exposures.append(abs(error(exposed)))
                    print(f"{row(iteration)} {row(exposed)}  {model} {flags}{more}", flush=True)
        summary("iterations", errors)
        summary("exposed communication", exposures)
        print_speedups(times)
    finally:
        remove_link()


if __name__ == "__main__":
    main()
