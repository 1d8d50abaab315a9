"""Trains the model of a `models/*.toml` file with PyTorch on the CPU and prints iteration times.

The model is that of `paceline train`: GPT-2 with pre-normalisation, tanh-GELU, fused QKV projection with
bias, tied embeddings, AdamW with betas (0.9, 0.95) and gradient clipping at norm 1. It uses PyTorch's fast
paths: fused attention (`scaled_dot_product_attention`), the fused optimizer, gradients set to none.

With `--distributed` it is one rank of DistributedDataParallel over Gloo, with torchrun's variables (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT), pinned to its own core. Each rank has its own batch, and the iteration
time is that of the slowest rank.

Prints one JSON object: seconds of each measured iteration, and peak resident memory.
"""

import argparse
import json
import os
import resource
import time
import tomllib

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, ffn)
        self.down = nn.Linear(ffn, width)

    def forward(self, x):
        batch, seq, width = x.shape
        split = (batch, seq, self.heads, width // self.heads)
        q, k, v = (t.view(split).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, model, seq):
        super().__init__()
        width = model["d_model"]
        self.table = nn.Embedding(model["vocab"], width)
        self.positions = nn.Embedding(max(model["seq"], seq), width)
        self.blocks = nn.ModuleList(
            Block(width, model["heads"], model["ffn"]) for _ in range(model["layers"])
        )
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.table(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", required=True, help="model file")
    arguments.add_argument("--batch", type=int, required=True)
    arguments.add_argument("--seq", type=int, required=True)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--warmup", type=int, default=2, help="unmeasured iterations")
    arguments.add_argument("--iterations", type=int, default=8)
    arguments.add_argument("--compile", action="store_true", help="use torch.compile")
    arguments.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    arguments.add_argument("--distributed", action="store_true", help="one rank of several")
    arguments.add_argument("--plain-adamw", action="store_true", help="the default, unfused AdamW")
    given = arguments.parse_args()

    rank = 0
    if given.distributed:
        rank = int(os.environ["RANK"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    with open(given.model, "rb") as file:
        described = tomllib.load(file)
    model = Gpt2(described, given.seq)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    loss_of = torch.compile(model) if given.compile else model
    if given.distributed:
        # Gradients as views of the buckets save a copy, as the PyTorch manual recommends.
        loss_of = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01,
        fused=not given.plain_adamw,
    )
    torch.manual_seed(1 + rank)
    text = torch.randint(0, described["vocab"], (given.batch, given.seq + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    times = []
    for _ in range(given.warmup + given.iterations):
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=given.bf16):
            loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - start)
    if given.distributed:
        slowest = torch.tensor(times, dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        times = slowest.tolist()
        torch.distributed.destroy_process_group()
        if rank > 0:
            return
    print(json.dumps({
        "parameters": parameters,
        "tokens": given.batch * given.seq,
        "iteration_s": times[given.warmup:],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": torch.__version__,
    }))


if __name__ == "__main__":
    main()
