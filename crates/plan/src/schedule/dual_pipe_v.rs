use super::{Action, Pass, Row};
use crate::ids::{Microbatch, Stage};
use std::collections::VecDeque;

/// DualPipe-V: DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) cut in half by Qi et al.
/// (2025), in the order of `dualpipev.py` of deepseek-ai/DualPipe.
///
/// Rank `r` of `p` has the chunks `down` (stage `r`) and `up` (stage `2p − 1 − r`). After the
/// warmup, each forward pass of one chunk is paired with a backward pass of the other. The
/// exchanges of one can then overlap with the compute of the other. While the pipeline fills and
/// drains, backward passes are split, and weight gradients wait in a queue. The schedule needs two
/// microbatches per rank.
pub(super) fn row(rank: u16, ranks: u16, microbatches: u32, row: &mut impl Row) {
    let (down, up) = (Chunk::new(rank), Chunk::new(2 * ranks - 1 - rank));
    let mut v = V { down, up, late: VecDeque::new(), row };
    let later = u32::from(ranks - 1 - rank);
    let earlier = u32::from(rank) + 1;

    for _ in 0..2 * later {
        v.forward(Leg::Down);
    }
    for _ in 0..earlier {
        v.forward(Leg::Down);
        v.forward(Leg::Up);
    }
    for _ in 0..later {
        v.backward(Leg::Up, true);
        v.weights();
        v.forward(Leg::Up);
    }
    for _ in 0..microbatches - 2 * u32::from(ranks) + earlier {
        v.forward(Leg::Down);
        v.backward(Leg::Up, false);
        v.forward(Leg::Up);
        v.backward(Leg::Down, false);
    }
    for _ in 0..later {
        v.backward(Leg::Up, false);
        v.forward(Leg::Up);
        v.backward(Leg::Down, false);
    }
    // Splits the second half of the pairs; a middle pair is split only on `down`.
    for pair in 0..earlier {
        let middle = earlier / 2;
        let odd = earlier % 2 == 1;
        v.backward(Leg::Up, pair > middle || pair == middle && !odd);
        v.backward(Leg::Down, pair >= middle);
    }
    for _ in 0..later {
        v.weights();
        v.backward(Leg::Down, true);
    }
    while v.weights() {}
}

/// One of a rank's two chunks and its progress.
struct Chunk {
    stage: Stage,
    forwards: u32,
    backwards: u32,
}

impl Chunk {
    fn new(stage: u16) -> Self {
        Self { stage: Stage(stage), forwards: 0, backwards: 0 }
    }
}

/// Leg of the V: down the ranks, or back up.
#[derive(Clone, Copy)]
enum Leg {
    Down,
    Up,
}

struct V<'a, R> {
    down: Chunk,
    up: Chunk,
    /// Backward passes whose weight gradients are still to be computed.
    late: VecDeque<(Stage, Microbatch)>,
    row: &'a mut R,
}

impl<R: Row> V<'_, R> {
    fn chunk(&mut self, way: Leg) -> &mut Chunk {
        match way {
            Leg::Down => &mut self.down,
            Leg::Up => &mut self.up,
        }
    }

    fn forward(&mut self, way: Leg) {
        let chunk = self.chunk(way);
        let (stage, microbatch) = (chunk.stage, Microbatch(chunk.forwards));
        chunk.forwards += 1;
        self.row.run(Action { stage, pass: Pass::Forward, microbatch });
    }

    fn backward(&mut self, way: Leg, split: bool) {
        let chunk = self.chunk(way);
        let (stage, microbatch) = (chunk.stage, Microbatch(chunk.backwards));
        chunk.backwards += 1;
        let pass = if split { Pass::BackwardInput } else { Pass::Backward };
        self.row.run(Action { stage, pass, microbatch });
        if split {
            self.late.push_back((stage, microbatch));
        }
    }

    /// Runs the oldest pending weight-gradient pass; returns false if none is pending.
    fn weights(&mut self) -> bool {
        let Some((stage, microbatch)) = self.late.pop_front() else { return false };
        self.row.run(Action { stage, pass: Pass::BackwardWeight, microbatch });
        true
    }
}
