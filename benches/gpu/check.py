"""Checks of paceline's GPU training that need no compiler: losses against the CPU's, equal bits, refusals.

    python3 benches/gpu/check.py PACELINE [PART...]

Parts: f32 bf16 f16 bits resume ranks. Each prints a line per case; the exit status is 1 if one failed.
"""

import json
import os
import subprocess
import sys
import tempfile

MODELS = {
    "mini": ["--model", "mini"],
    "mini, 4 microbatches, untied": ["--model", "UNTIED", "--micro-batch", "2"],
    # At the default rate its gradient explodes around iteration 45, and with it what rounding has left.
    "mini-llama": ["--model", "mini-llama", "--lr", "0.0005"],
    "mlp": ["--model", "mlp"],
    "odd": ["--model", "ODD", "--seq", "37"],
    "odd llama": ["--model", "ODD_LLAMA", "--seq", "50"],
}
FILES = {
    "UNTIED": 'kind = "gpt2"\nlayers = 3\nd_model = 96\nheads = 3\nffn = 200\nseq = 64\nvocab = 256\ntied = false\n',
    "ODD": 'kind = "gpt2"\nlayers = 2\nd_model = 60\nheads = 3\nffn = 130\nseq = 64\nvocab = 259\ntied = true\n',
    "ODD_LLAMA": 'kind = "llama"\nlayers = 2\nd_model = 72\nheads = 6\nkv_heads = 2\nffn = 100\nseq = 64\n'
    'vocab = 259\ntied = false\nrope_theta = 10000.0\nnorm_eps = 1e-5\n',
}
# Layouts on one GPU, of models and batches that they divide; True for those with the bits of one rank.
LAYOUTS = [
    ("dp 2", "mini", ["--dp", "2", "--order", "canonical", "--leaves", "4"], True),
    ("dp 4", "mini", ["--dp", "4", "--order", "canonical", "--leaves", "4"], True),
    ("dp 2, zero 1", "mini", ["--dp", "2", "--zero", "1", "--order", "canonical", "--leaves", "4"], True),
    ("dp 2, zero 2", "mini", ["--dp", "2", "--zero", "2"], False),
    ("dp 2, zero 3", "mini", ["--dp", "2", "--zero", "3"], False),
    ("pp 2, gpipe", "mini", ["--pp", "2", "--schedule", "gpipe", "--leaves", "4"], True),
    ("pp 2, 1f1b", "mini", ["--pp", "2", "--schedule", "1f1b", "--leaves", "4"], True),
    ("pp 2, interleaved", "mini", ["--pp", "2", "--schedule", "interleaved:2", "--leaves", "4"], True),
    ("pp 2, zb-h1", "mini", ["--pp", "2", "--schedule", "zb-h1", "--leaves", "4"], True),
    ("pp 2, dualpipev", "mini", ["--pp", "2", "--schedule", "dualpipev", "--leaves", "4"], True),
    ("pp 4, 1f1b", "mini", ["--pp", "4", "--schedule", "1f1b", "--leaves", "4"], True),
    ("tp 2", "mini", ["--tp", "2"], False),
    ("tp 2, sp", "mini-llama", ["--tp", "2", "--sp"], False),
    ("dp 2, tp 2", "mini", ["--dp", "2", "--tp", "2"], False),
    ("cp 2", "mini-llama", ["--cp", "2"], False),
    ("ep 2", "mini-moe", ["--dp", "2", "--ep", "2"], False),
]
failed = []


def say(ok, text):
    print(("ok     " if ok else "WRONG  ") + text, flush=True)
    if not ok:
        failed.append(text)


def losses(binary, flags, iterations, folder, device, extra=()):
    files = {name: os.path.join(folder, name.lower() + ".toml") for name in FILES}
    for name, path in files.items():
        with open(path, "w") as file:
            file.write(FILES[name])
    flags = [files.get(flag, flag) for flag in flags]
    if "--micro-batch" not in flags:
        flags = flags + ["--micro-batch", "8"]
    command = [binary, "train", *flags, "--global-batch", "8", "--iterations", str(iterations), "--clip", "1",
               "--device", device, "--json", "--out", os.path.join(folder, "run"), *extra]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        subprocess.run(["pkill", "-9", "-f", os.path.join(folder, "run")])
        out, err = process.communicate()
        raise RuntimeError(f"{' '.join(command[1:])}: no end after 60 s: {err[-500:]}")
    finally:
        subprocess.run(["rm", "-rf", os.path.join(folder, "run")])
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [event for event in events if event.get("event") == "iteration"]
    if done.returncode != 0 or len(found) != iterations:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.returncode} {done.stdout[-300:]} {done.stderr[-1200:]}")
    return found


def attempt(name, body):
    try:
        body()
    except Exception as error:
        say(False, f"{name}: {error}")


def close(binary, folder, name, flags):
    gpu, cpu = (losses(binary, flags, 50, folder, device) for device in ("cuda", "cpu"))
    off = [abs(g["loss"] - c["loss"]) / abs(c["loss"]) for g, c in zip(gpu, cpu)]
    norm = abs(gpu[0]["grad_norm"] - cpu[0]["grad_norm"]) / cpu[0]["grad_norm"]
    ok = off[0] < 1e-5 and max(off) < 1e-4 and norm < 1e-4
    say(ok, f"{name} f32: loss {gpu[-1]['loss']:.4f}, off by {off[0]:.1e} in the first iteration, {max(off):.1e} at most "
            f"(iteration {1 + off.index(max(off))}), norm {norm:.1e}")
    if not ok:
        print("   ", [f"{o:.0e}" for o in off[::5]], [f"{g['grad_norm']:.2f}" for g in gpu[::5]])


def near(binary, folder, name, flags, dtype):
    wide = losses(binary, flags, 50, folder, "cpu")
    gpu, cpu = (losses(binary, flags, 50, folder, device, ["--dtype", dtype]) for device in ("cuda", "cpu"))
    off = [max(abs(x["loss"] - w["loss"]) / abs(w["loss"]) for x, w in zip(run, wide)) for run in (gpu, cpu)]
    say(off[0] < 1.5 * off[1] + 2e-3, f"{name} {dtype}: off f32 by {off[0]:.1e} at most, the CPU's {dtype} by {off[1]:.1e}")


def bits(binary, folder, name, flags):
    for dtype in ("f32", "bf16"):
        one, two = (losses(binary, flags, 10, folder, "cuda", ["--dtype", dtype]) for _ in range(2))
        same = [(a["loss_bits"], a["grad_norm"]) for a in one] == [(b["loss_bits"], b["grad_norm"]) for b in two]
        say(same, f"{name} {dtype}: the same plan twice gives the same bits")


def resume(binary, folder):
    run, again = os.path.join(folder, "whole"), os.path.join(folder, "again")
    base = [binary, "train", "--json", "--device", "cuda"]
    sizes = ["--model", "mini", "--global-batch", "8", "--micro-batch", "8", "--dtype", "bf16"]
    last = []
    for command in ([*base, *sizes, "--iterations", "10", "--out", run, "--save-every", "5"],
                    [*base, "--resume", RESUME(run), "--iterations", "10", "--out", again]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-800:]}")
        events = [json.loads(line) for line in done.stdout.splitlines()]
        last.append([e["loss_bits"] for e in events if e.get("event") == "iteration"][-1])
    say(last[0] == last[1], f"resume after 5 of 10 iterations: {last}")


def ranks(binary, folder, names):
    """Layouts of several ranks on the one GPU against one rank there, 20 iterations."""
    extra = os.environ.get("RANKS_FLAGS", "--share-device").split()
    alone = {}
    for name, model, layout, exact in LAYOUTS:
        if names and not any(wanted in name for wanted in names):
            continue
        try:
            shape = ["--model", model, "--micro-batch", "2"]
            leaves = layout[layout.index("--leaves"):][:2] if "--leaves" in layout else []
            key = (model, *leaves)
            if key not in alone:
                alone[key] = losses(binary, shape + leaves, 20, folder, "cuda")
            found = losses(binary, shape + layout, 20, folder, "cuda", extra)
            one = alone[key]
            off = max(abs(f["loss"] - o["loss"]) / abs(o["loss"]) for f, o in zip(found, one))
            same = [f["loss_bits"] for f in found] == [o["loss_bits"] for o in one]
            say(same if exact else off < 1e-3,
                f"{name} ({model}): off one rank by {off:.1e} at most" + (", the same bits" if same else ""))
        except Exception as error:
            say(False, f"{name}: {error}")


def RESUME(run):
    saved = os.path.join(run, "checkpoints")
    names = sorted(name for name in os.listdir(saved)) if os.path.isdir(saved) else []
    return os.path.join(saved, next((name for name in names if name.endswith("5")), names[0] if names else ""))


def main():
    binary, parts = sys.argv[1], sys.argv[2:] or ["f32", "bf16", "f16", "bits", "resume"]
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in MODELS.items():
            if "f32" in parts:
                attempt(name, lambda: close(binary, folder, name, flags))
            for dtype in ("bf16", "f16"):
                if dtype in parts:
                    attempt(name, lambda: near(binary, folder, name, flags, dtype))
            if "bits" in parts:
                attempt(name, lambda: bits(binary, folder, name, flags))
        for part in parts:
            if part.startswith("ranks"):
                ranks(binary, folder, [name for name in part[5:].strip(":").split(",") if name])
        if "resume" in parts:
            attempt("resume", lambda: resume(binary, folder))
    sys.exit(1 if failed else 0)


main()
