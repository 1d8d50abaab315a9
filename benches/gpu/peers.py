"""Times training iterations of GPT-2 and Llama models in PyTorch: bf16 autocast, fused AdamW, gradient norm
clipped to 1, and, with --paceline, those of paceline, alternating with PyTorch's on the same GPU. Prints a JSON
object for each measurement, and a last one with the ratio of the medians and the peaks of memory.

    python3 benches/gpu/peers.py gpt2-124m --modes default reduce-overhead --paceline target/release/paceline
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

MODELS = {  # layers, width, heads, kv heads, ffn, vocabulary, batch, sequence
    "gpt2-124m": (12, 768, 12, 12, 3072, 50304, 64, 1024),
    "gpt2-350m": (24, 1024, 16, 16, 4096, 50304, 32, 1024),
    "gpt2-1.5b": (48, 1600, 25, 25, 6400, 50304, 16, 1024),
    "llama-1.2b": (16, 2048, 32, 8, 8192, 128256, 8, 2048),
}


class Attention(nn.Module):
    def __init__(self, d, heads, kv_heads, bias):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, d // heads
        self.qkv = nn.Linear(d, (heads + 2 * kv_heads) * self.head, bias=bias)
        self.out = nn.Linear(d, d, bias=bias)

    def forward(self, x, turn):
        b, t, d = x.shape
        q, k, v = self.qkv(x).split([d, self.kv_heads * self.head, self.kv_heads * self.head], -1)
        q = q.view(b, t, self.heads, self.head).transpose(1, 2)
        k = k.view(b, t, self.kv_heads, self.head).transpose(1, 2)
        v = v.view(b, t, self.kv_heads, self.head).transpose(1, 2)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Gpt2Block(nn.Module):
    def __init__(self, d, heads, _kv, f):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, heads, heads, True)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, turn):
        x = x + self.attention(self.n1(x), turn)
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class LlamaBlock(nn.Module):
    def __init__(self, d, heads, kv_heads, f):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attention = Attention(d, heads, kv_heads, False)
        self.gate, self.up = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x, turn):
        x = x + self.attention(self.n1(x), turn)
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, layers, d, heads, kv_heads, f, vocab, _batch, seq, llama):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.positions = None if llama else nn.Embedding(seq, d)
        block = LlamaBlock if llama else Gpt2Block
        self.blocks = nn.ModuleList(block(d, heads, kv_heads, f) for _ in range(layers))
        self.norm = nn.RMSNorm(d) if llama else nn.LayerNorm(d)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        if llama:
            angle = torch.outer(torch.arange(seq), 500000.0 ** (-torch.arange(0, d // heads, 2) / (d // heads)))
            angle = torch.cat((angle, angle), -1)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids, targets):
        x = self.embed(ids)
        turn = None
        if self.positions is not None:
            x = x + self.positions.weight
        else:
            turn = (self.cos.to(torch.bfloat16), self.sin.to(torch.bfloat16))
        for block in self.blocks:
            x = block(x, turn)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


FILES = {"gpt2-124m": ("gpt2", True), "gpt2-350m": ("gpt2", True), "gpt2-1.5b": ("gpt2", True), "llama-1.2b": ("llama", True)}


def model_file(name):
    """The same shape as a model file of paceline, with the vocabulary padded as for PyTorch."""
    layers, d, heads, kv_heads, f, vocab, _, seq = MODELS[name]
    kind, tied = FILES[name]
    lines = [f'kind = "{kind}"', f"layers = {layers}", f"d_model = {d}", f"heads = {heads}", f"ffn = {f}",
             f"seq = {seq}", f"vocab = {vocab}", f"tied = {str(tied).lower()}"]
    if kind == "llama":
        lines += [f"kv_heads = {kv_heads}", "rope_theta = 500000.0", "norm_eps = 1e-5"]
    file = tempfile.NamedTemporaryFile("w", suffix=".toml", prefix=name + "-", delete=False)
    with file:
        file.write("\n".join(lines) + "\n")
    return file.name


class Torch:
    def __init__(self, name, mode):
        shape = MODELS[name]
        self.name, self.mode = name, mode
        self.batch, self.seq = shape[6], shape[7]
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        with torch.device("cuda"):
            self.model = Model(*shape, llama=name.startswith("llama"))
            self.ids = torch.randint(0, 50257, (self.batch, self.seq + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        self.step = self.model if mode == "eager" else torch.compile(self.model, mode=mode)
        for _ in range(5):
            self.iteration()
        torch.cuda.synchronize()

    def iteration(self):
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.step(self.ids[:, :-1].contiguous(), self.ids[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def measure(self, iterations):
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(iterations):
            start = time.perf_counter()
            loss = self.iteration()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        assert math.isfinite(loss.item())
        peak = torch.cuda.max_memory_allocated()
        del loss
        # What PyTorch keeps for later allocations would be missing to paceline.
        torch.cuda.empty_cache()
        return times, peak


def measure_paceline(binary, name, file, iterations):
    _, _, _, _, _, _, batch, seq = MODELS[name]
    command = [binary, "bench", "train", "--model", file, "--device", "cuda", "--dtype", "bf16", "--seq", str(seq),
               "--global-batch", str(batch), "--micro-batch", str(batch), "--clip", "1", "--lr", "1e-4",
               "--weight-decay", "0.1", "--iterations", str(iterations), "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    took = time.perf_counter() - start
    if done.returncode != 0 or not done.stdout.strip():
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    last = json.loads(done.stdout.splitlines()[-1])
    # The first iterations, which compile kernels and choose algorithms, are left out.
    times = [last["min_s"], last["measured_iteration_s"], last["p90_s"]]
    return times, last["peak_bytes"][0], took, last["loss"]


def line(name, software, times, peak, **more):
    _, _, _, _, _, _, batch, seq = MODELS[name]
    median = statistics.median(times)
    row = {"model": name, "software": software, "ms": round(median * 1e3, 2), "fastest_ms": round(min(times) * 1e3, 2),
           "tokens_per_s": round(batch * seq / median), "peak_gib": round(peak / 2**30, 2), **more}
    print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--modes", nargs="*", default=["default"], help="modes of torch.compile, or 'eager'")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--paceline", help="binary built with --features cuda")
    args = parser.parse_args()
    file = model_file(args.model)
    ours, theirs, our_peak, their_peak = [], {mode: [] for mode in args.modes}, 0, {}
    if args.paceline:
        # Chooses algorithms, and stores them for the measured runs.
        measure_paceline(args.paceline, args.model, file, 3)
    for mode in args.modes:
        software = f"PyTorch {torch.__version__} {mode}"
        peer = Torch(args.model, mode)
        for _ in range(args.rounds):
            times, peak = peer.measure(args.iterations)
            theirs[mode] += times
            their_peak[mode] = peak
            line(args.model, software, times, peak)
            if args.paceline:
                times, peak, took, loss = measure_paceline(args.paceline, args.model, file, args.iterations + 3)
                ours.append(times[1])
                our_peak = peak
                line(args.model, "paceline", times, peak, process_s=round(took, 1), loss=loss)
        del peer
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    os.unlink(file)
    if ours and args.modes:
        best = min(theirs, key=lambda mode: statistics.median(theirs[mode]))
        ratio = statistics.median(theirs[best]) / statistics.median(ours)
        print(json.dumps({"model": args.model, "against": best, "ratio": round(ratio, 4),
                          "peak_ratio": round(our_peak / their_peak[best], 4)}), flush=True)


main()
