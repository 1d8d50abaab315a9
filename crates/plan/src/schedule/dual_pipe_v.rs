use super::{Action, Pass, Row};
use crate::ids::{Microbatch, Stage};
use std::collections::VecDeque;

/// DualPipe-V: DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) cut in half by Qi et al. (2025),
/// in the order of `dualpipev.py` of deepseek-ai/DualPipe.
///
/// Rank `r` of `p` has the chunks `down` (stage `r`) and `up` (stage `2p − 1 − r`). After the warmup,
/// each forward pass of one chunk stands beside a backward pass of the other, so that the exchanges
/// of one can be hidden behind the computations of the other. Where the pipeline fills and drains,
/// backward passes are split, and weights' gradients wait in a queue. It needs two microbatches for
/// each rank.
pub(super) fn row(rank: u16, ranks: u16, microbatches: u32, row: &mut impl Row) {
    let (down, up) = (Chunk::new(rank), Chunk::new(2 * ranks - 1 - rank));
    let mut v = V { down, up, late: VecDeque::new(), row };
    let later = u32::from(ranks - 1 - rank);
    let earlier = u32::from(rank) + 1;

    for _ in 0..2 * later {
        v.forward(Way::Down);
    }
    for _ in 0..earlier {
        v.forward(Way::Down);
        v.forward(Way::Up);
    }
    for _ in 0..later {
        v.backward(Way::Up, true);
        v.weights();
        v.forward(Way::Up);
    }
    for _ in 0..microbatches - 2 * u32::from(ranks) + earlier {
        v.forward(Way::Down);
        v.backward(Way::Up, false);
        v.forward(Way::Up);
        v.backward(Way::Down, false);
    }
    for _ in 0..later {
        v.backward(Way::Up, false);
        v.forward(Way::Up);
        v.backward(Way::Down, false);
    }
    // The second half of these is split; a rank with an odd number of pairs splits the middle one.
    for pair in 0..earlier {
        let middle = earlier / 2;
        let odd = earlier % 2 == 1;
        v.backward(Way::Up, pair > middle || pair == middle && !odd);
        v.backward(Way::Down, pair >= middle);
    }
    for _ in 0..later {
        v.weights();
        v.backward(Way::Down, true);
    }
    while v.weights() {}
}

/// One of a rank's two chunks, and how far it has come.
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

/// Which chunk: that on the way down the ranks, or that on the way up again.
#[derive(Clone, Copy)]
enum Way {
    Down,
    Up,
}

struct V<'a, R> {
    down: Chunk,
    up: Chunk,
    /// Backward passes whose weights' gradients are still to be made.
    late: VecDeque<(Stage, Microbatch)>,
    row: &'a mut R,
}

impl<R: Row> V<'_, R> {
    fn chunk(&mut self, way: Way) -> &mut Chunk {
        match way {
            Way::Down => &mut self.down,
            Way::Up => &mut self.up,
        }
    }

    fn forward(&mut self, way: Way) {
        let chunk = self.chunk(way);
        let (stage, microbatch) = (chunk.stage, Microbatch(chunk.forwards));
        chunk.forwards += 1;
        self.row.run(Action { stage, pass: Pass::Forward, microbatch });
    }

    fn backward(&mut self, way: Way, split: bool) {
        let chunk = self.chunk(way);
        let (stage, microbatch) = (chunk.stage, Microbatch(chunk.backwards));
        chunk.backwards += 1;
        let pass = if split { Pass::BackwardInput } else { Pass::Backward };
        self.row.run(Action { stage, pass, microbatch });
        if split {
            self.late.push_back((stage, microbatch));
        }
    }

    /// Makes the oldest weights' gradients that are still to be made, if any are.
    fn weights(&mut self) -> bool {
        let Some((stage, microbatch)) = self.late.pop_front() else { return false };
        self.row.run(Action { stage, pass: Pass::BackwardWeight, microbatch });
        true
    }
}
