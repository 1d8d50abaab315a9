#!/usr/bin/env python3
"""Trains two ranks across a link that is shaped to a rate, and prints what overlap is worth there.

usage: shaped.py PACELINE [--rate 1gbit] [--cluster CALIBRATED.toml] [--flags "…"] [--only TEXT]

Each rank stands in a network namespace of its own and on a core of its own; a veth pair joins them,
with a token bucket at both ends (`tc tbf`). A link that was idle gives what its bucket holds at once, as
no wire does, so the bucket is small. But it has room for the largest packet that TCP hands down (64 KiB): what does not fit in is
cut into frames by the core that computes, which a network card would do for it. This needs root. With the file of `paceline calibrate` on
this machine, predictions are made for two hosts of one core each, joined by a link of that rate less
the heads of its frames, and of the latency that was measured through a socket. Nothing is fitted. Each
row is trained with overlap and without. At the end stands what compression is worth: how many times shorter an iteration
is than with gradients as they are.
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


def join(rate):
    part()
    for host in HOSTS:
        sh(f"ip netns add {host}")
    sh(f"ip link add veth-a netns {HOSTS[0]} type veth peer name veth-b netns {HOSTS[1]}")
    for host, end, address in zip(HOSTS, ("veth-a", "veth-b"), ADDRESSES):
        run = f"ip netns exec {host}"
        sh(f"{run} ip addr add {address}/24 dev {end}")
        sh(f"{run} ip link set {end} up")
        sh(f"{run} ip link set lo up")
        sh(f"{run} tc qdisc add dev {end} root tbf rate {rate} burst 72kb latency 100ms")


def part():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def two_hosts(calibrated, rate, folder):
    """The cluster file of this set-up, from that of one host."""
    described = tomllib.loads(calibrated)
    tcp = next(wire for wire in described["measured"]["wire"] if wire["transport"] == "tcp")
    latency = min(message["time"] for message in tcp["messages"])
    payload = 1448 / 1514  # of an Ethernet frame that carries IPv4 and TCP with timestamps
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
    # The two hosts are one machine: a rank is never alone with its caches and its memory.
    text = re.sub(r"alone = (\[[^]]*\]|[^,]*), together = (\[[^]]*\]|[^ ,}]*)", r"alone = \2, together = \2", text)
    at = text.index("\n# Times are in seconds")
    path = folder / "two-hosts.toml"
    path.write_text(text[:at] + link + text[at:])
    return str(path)


def train(given, model, flags, folder):
    """What rank 0 says at the end, and the median iteration without the first two."""
    secret = secrets.token_hex(16)
    ranks = []
    cores = sorted(os.sched_getaffinity(0))
    for rank, (host, address) in enumerate(zip(HOSTS, ADDRESSES)):
        place = {
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
        environment = {**os.environ, **place}
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


def gains(times):
    """What compression is worth, from the predicted and measured iterations by flags."""
    for flags, compressed in times.items():
        rest, _, how = flags.partition("--compress ")
        how, _, more = how.partition(" ")
        plain = times.get(f"{rest}--compress none" + (f" {more}" if more else ""))
        if how and how != "none" and plain:
            predicted, measured = (a / b for a, b in zip(plain, compressed))
            off = f"{100 * (predicted / measured - 1):+.1f} %"
            print(f"gain of {how} {more}: predicted {predicted:.2f}, measured {measured:.2f}, {off}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--cluster", default="")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--flags", default="", help="more flags for every row")
    parser.add_argument("--only", default="", help="rows whose text contains this")
    given = parser.parse_args()
    errors, exposures, times = [], [], {}
    join(given.rate)
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
        gains(times)
    finally:
        part()


if __name__ == "__main__":
    main()
