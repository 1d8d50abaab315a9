"""Times training iterations of GPT-2 and Llama models in PyTorch: bf16 autocast, fused AdamW, gradient norm
clipped to 1. Prints one JSON object: milliseconds per iteration, tokens per second, peak memory.

    python3 benches/gpu/pytorch_train.py gpt2-124m --mode default
"""

import argparse
import json
import math
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--mode", default="default", help="torch.compile's mode, or 'eager'")
    parser.add_argument("--iterations", type=int, default=20)
    args = parser.parse_args()
    shape = MODELS[args.model]
    batch, seq, vocab = shape[6], shape[7], shape[5]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Model(*shape, llama=args.model.startswith("llama"))
        ids = torch.randint(0, 50257, (batch, seq + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    step = model if args.mode == "eager" else torch.compile(model, mode=args.mode)

    def iteration():
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(5):
        loss = iteration()
    torch.cuda.synchronize()
    times = []
    for _ in range(args.iterations):
        start = time.perf_counter()
        loss = iteration()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    times.sort()
    median = times[len(times) // 2]
    assert math.isfinite(loss.item())
    print(
        json.dumps(
            {
                "model": args.model,
                "software": f"PyTorch {torch.__version__} {args.mode}",
                "ms": round(median * 1e3, 2),
                "fastest_ms": round(times[0] * 1e3, 2),
                "tokens_per_s": round(batch * seq / median),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            }
        )
    )


main()
