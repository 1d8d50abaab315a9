"""Writes PyTorch's own pipeline schedules as the CSV files that `schedule_golden.rs` compares with.

Run with any Python that has torch:  python make_golden.py
"""

import csv
import io
import pathlib
import types

from torch.distributed.pipelining import schedules

HERE = pathlib.Path(__file__).parent
RANKS = (2, 3, 4, 8)

# Newer releases drop the idle cells of single-stage schedules when they append the gradient
# reduction. The grid with its idle cells is what we compare, so that step is taken out here.
if hasattr(schedules, "_add_reduce_grad"):
    schedules._add_reduce_grad = lambda actions, *_, **__: actions


class SilentStage(types.SimpleNamespace):
    """A stage that records which microbatch it was asked for, and has nothing to send or receive."""

    submod = None
    has_backward = True
    is_last = False  # keeps the loss function out of the run

    def __init__(self, rank, ranks, chunk=0, chunks=1):
        super().__init__(
            group_rank=rank,
            group_size=ranks,
            group=None,
            stage_index=chunk * ranks + rank,
            num_stages=chunks * ranks,
            calls=[],
        )

    def forward_one_chunk(self, microbatch, *_, **__):
        self.calls.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, *_, **__):
        self.calls.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name):
        if name.startswith("get_") and name.endswith("_ops"):
            return lambda *_: []
        if name in ("release_fwd_send_outputs", "perform_reduce_grad", "scale_grads"):
            return lambda *_: None
        raise AttributeError(name)


class ComputeOnly(schedules.ScheduleInterleaved1F1B):
    """The compute order is wanted, not the sends and receives that the runtime derives from it."""

    def _prepare_schedule_with_comms(self, *_, **__):
        pass


def interleaved(chunks, ranks, microbatches):
    stages = [SilentStage(0, ranks, chunk, chunks) for chunk in range(chunks)]
    return table(ComputeOnly(stages, microbatches))


class ComputeOnlyZeroBubble(schedules.ScheduleInterleavedZeroBubble):
    """The same for the split backward pass."""

    def _prepare_schedule_with_comms(self, *_, **__):
        pass


class ComputeOnlyDualPipeV(schedules.ScheduleDualPipeV):
    """The same for the V."""

    def _prepare_schedule_with_comms(self, *_, **__):
        pass


def split(cls, chunks, ranks, microbatches):
    """The order of a schedule with a split backward pass. Its table's idle cells say nothing: they
    leave no room for gradients on their way. A forward and a backward pass that may run as one are
    two passes."""
    stages = [SilentStage(0, ranks, chunk, chunks) for chunk in range(chunks)]
    rows = table(cls(stages, microbatches))
    passes = [[a for action in row if action for a in action.sub_actions or (action,)] for row in rows]
    return [[str(action) for action in row] for row in passes]


def single(cls, ranks, microbatches):
    """A schedule of one stage per rank: its table, and what its runtime makes each rank execute."""
    stages = [SilentStage(rank, ranks) for rank in range(ranks)]
    built = [cls(stage, microbatches) for stage in stages]
    for schedule in built:
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches()
    return table(built[0]), [stage.calls for stage in stages]


def table(schedule):
    order = schedule.pipeline_order
    return [order[rank] for rank in sorted(order)]


def refused(ranks, limit=64):
    """The microbatch counts for which PyTorch will not build an interleaved schedule."""
    for microbatches in range(1, limit + 1):
        try:
            interleaved(2, ranks, microbatches)
        except ValueError:
            yield microbatches


def lines(rows):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write(name, cases):
    """One file of cases, each under a line `# kind ranks microbatches`."""
    body = "".join(f"# {kind} {pp} {m}\n{lines(rows)}" for kind, pp, m, rows in cases)
    (HERE / name).write_text(body, newline="\n")


if __name__ == "__main__":
    tables, runs = [], []
    for kind, cls, counts in (
        ("gpipe", schedules.ScheduleGPipe, lambda pp: (1, pp, 2 * pp + 1)),
        ("1f1b", schedules.Schedule1F1B, lambda pp: (pp, pp + 1, 3 * pp)),
    ):
        for pp in RANKS:
            for m in counts(pp):
                grid, run = single(cls, pp, m)
                tables.append((kind, pp, m, grid))
                runs.append((kind, pp, m, run))
    write("single_stage_tables.csv", tables)
    write("single_stage_runs.csv", runs)

    tables = []
    for chunks in (1, 2, 3):
        for pp in RANKS:
            for m in sorted({pp - 1, pp, 2 * pp - 1, 2 * pp, 2 * pp + 2}):
                tables.append((f"interleaved:{chunks}", pp, m, interleaved(chunks, pp, m)))
    write("interleaved_tables.csv", tables)

    orders = []
    for chunks in (1, 2, 3):
        for pp in RANKS:
            for m in (pp, 2 * pp, 3 * pp):
                rows = split(ComputeOnlyZeroBubble, chunks, pp, m)
                orders.append((f"zb-h1:{chunks}" if chunks > 1 else "zb-h1", pp, m, rows))
    for pp in RANKS:
        for m in (2 * pp, 2 * pp + 1, 4 * pp):
            orders.append(("dualpipev", pp, m, split(ComputeOnlyDualPipeV, 2, pp, m)))
    write("split_orders.csv", orders)
    (HERE / "interleaved_refused.csv").write_text(lines([pp, *refused(pp)] for pp in RANKS))
