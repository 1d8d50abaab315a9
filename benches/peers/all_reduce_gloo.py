"""Times an all_reduce of f32 vectors with Gloo through torch.distributed.

    python all_reduce_gloo.py RANKS MILLISECONDS BYTES...

Starts its own ranks. Prints one line per size: bytes, median microseconds of the slowest rank.
"""

import os
import statistics
import sys
import time


def rank_main(rank, ranks, port, budget, sizes):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for size in sizes:
        data = torch.ones(size // 4)

        def lap():
            if size > 1 << 20:
                dist.barrier()
            data.fill_(1.0)
            start = time.perf_counter()
            dist.all_reduce(data)
            return time.perf_counter() - start

        lap()
        affordable = torch.tensor([min(max(3.0, budget / max(lap(), 1e-6)), 5000.0)])
        dist.all_reduce(affordable, op=dist.ReduceOp.MIN)
        laps = int(affordable.item())
        for _ in range(laps // 8):
            lap()
        times = torch.tensor([lap() for _ in range(laps)], dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(size, f"{statistics.median(times.tolist()) * 1e6:.3f}", flush=True)
    dist.destroy_process_group()


def main():
    ranks, budget, sizes = int(sys.argv[1]), float(sys.argv[2]) / 1e3, list(map(int, sys.argv[3:]))
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            rank_main(rank, ranks, port, budget, sizes)
            os._exit(0)
        children.append(child)
    rank_main(0, ranks, port, budget, sizes)
    for child in children:
        os.waitpid(child, 0)


main()
