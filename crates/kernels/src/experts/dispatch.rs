//! Permutes tokens into expert order, and combines the experts' outputs in token order.

use super::route::DROPPED;
use crate::ordered_sum;
use crate::pool::{Pool, strips};
use crate::shape::expect_len;
use crate::{Element, Rows};
use std::fmt;

/// Slot of a dropped choice.
pub const NOWHERE: u32 = u32::MAX;

/// Sizes of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of tokens and their width.
    pub tokens: Rows,
    /// Number of experts per token.
    pub topk: usize,
    /// Total number of experts.
    pub experts: usize,
    /// Number of regions, one for each rank that holds an equal share of the experts.
    pub regions: usize,
    /// Number of rows for the experts of one region.
    pub region_rows: usize,
}

/// Error: more tokens are routed to a region's experts than it has rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Index of the region.
    pub region: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of choices of all tokens.
    pub choices: usize,
    /// Number of regions.
    pub regions: usize,
}

impl Full {
    /// Rows that the region needs, as a multiple of an equal share of the choices.
    pub fn factor(&self) -> f64 {
        self.tokens as f64 * self.regions as f64 / self.choices.max(1) as f64
    }
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { region, tokens, rows, .. } = self;
        write!(f, "{tokens} tokens go to the experts of part {region}, which has room for {rows}")
    }
}

/// Assigns a slot to every choice: `slots[tokens, topk]`, and counts `counts[experts]`. Within an
/// expert, tokens keep their order. `starts` is a workspace of one element per expert.
///
/// Fails with the region that lacks most rows, if one does. Slots and counts are sound then, too:
/// what has no row has no slot and is not counted.
pub fn places(
    shape: Shape,
    choices: &[u32],
    slots: &mut [u32],
    counts: &mut [u32],
    starts: &mut [u32],
) -> Result<(), Full> {
    expect_len("choices", choices.len(), &[shape.tokens.rows, shape.topk]);
    expect_len("slots", slots.len(), &[shape.tokens.rows, shape.topk]);
    expect_len("counts", counts.len(), &[shape.experts]);
    counts.fill(0);
    for (slot, &choice) in slots.iter_mut().zip(choices) {
        *slot = NOWHERE;
        if choice & DROPPED == 0 {
            let taken = &mut counts[choice as usize];
            *slot = *taken;
            *taken += 1;
        }
    }
    let each = shape.experts / shape.regions.max(1);
    let mut full: Option<Full> = None;
    for region in 0..shape.regions {
        let first = region * shape.region_rows;
        let (mut next, end) = (first, first + shape.region_rows);
        for expert in region * each..(region + 1) * each {
            let start = next.min(end);
            next += counts[expert] as usize;
            starts[expert] = start as u32;
            counts[expert] = counts[expert].min((end - start) as u32);
        }
        let tokens = next - first;
        if tokens > full.map_or(shape.region_rows, |full| full.tokens) {
            let (rows, regions) = (shape.region_rows, shape.regions);
            full = Some(Full { region, tokens, rows, choices: choices.len(), regions });
        }
    }
    for (slot, &choice) in slots.iter_mut().zip(choices) {
        if choice & DROPPED == 0 {
            let expert = choice as usize;
            *slot = if *slot < counts[expert] { *slot + starts[expert] } else { NOWHERE };
        }
    }
    full.map_or(Ok(()), Err)
}

/// Copies every token into each of its slots; slots without a token are zero.
pub fn scatter<T: Element>(pool: &Pool, shape: Shape, x: &[T], slots: &[u32], rows: &mut [T]) {
    spread(pool, shape, slots, rows, |token, _, row| {
        row.copy_from_slice(&x[shape.tokens.range(token)]);
    });
}

/// Gradient of the tokens: the sum of the gradients of their copies.
pub fn gather<T: Element>(pool: &Pool, shape: Shape, drows: &[T], slots: &[u32], dx: &mut [T]) {
    weighted(pool, shape, drows, slots, None, dx);
}

/// Output of each token: the weighted sum of its experts' outputs.
pub fn combine<T: Element>(
    pool: &Pool,
    shape: Shape,
    rows: &[T],
    slots: &[u32],
    gates: &[f32],
    y: &mut [T],
) {
    weighted(pool, shape, rows, slots, Some(gates), y);
}

/// Gradients of the experts' outputs and of the gates. A dropped choice has none.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn combine_gradient<T: Element>(
    pool: &Pool,
    shape: Shape,
    dy: &[T],
    rows: &[T],
    slots: &[u32],
    gates: &[f32],
    drows: &mut [T],
    dgates: &mut [f32],
) {
    let (width, topk) = (shape.tokens.width, shape.topk);
    spread(pool, shape, slots, drows, |token, at, row| {
        let gate = gates[token * topk + at];
        for (row, dy) in row.iter_mut().zip(&dy[shape.tokens.range(token)]) {
            *row = T::narrow(gate * dy.widen());
        }
    });
    expect_len("dgates", dgates.len(), &[shape.tokens.rows, topk]);
    pool.for_each_block(shape.tokens.rows, block(width), strips(dgates, topk), |tokens, dgates| {
        for (token, dgates) in tokens.zip(dgates.chunks_exact_mut(topk)) {
            let dy = &dy[shape.tokens.range(token)];
            for (dgate, &slot) in dgates.iter_mut().zip(&slots[token * topk..][..topk]) {
                *dgate = match slot {
                    NOWHERE => 0.0,
                    slot => {
                        let row = &rows[slot as usize * width..][..width];
                        ordered_sum::sum([dy, row], |[dy, row]| dy * row)
                    }
                };
            }
        }
    });
}

fn weighted<T: Element>(
    pool: &Pool,
    shape: Shape,
    rows: &[T],
    slots: &[u32],
    gates: Option<&[f32]>,
    y: &mut [T],
) {
    let (width, topk) = (shape.tokens.width, shape.topk);
    pool.for_each_block(shape.tokens.rows, block(width), strips(y, width), |tokens, y| {
        for (token, y) in tokens.zip(y.chunks_exact_mut(width)) {
            let at = token * topk..(token + 1) * topk;
            for (column, y) in y.iter_mut().enumerate() {
                let mut sum = 0.0;
                for at in at.clone().filter(|&at| slots[at] != NOWHERE) {
                    let value = rows[slots[at] as usize * width + column].widen();
                    sum += gates.map_or(1.0, |gates| gates[at]) * value;
                }
                *y = T::narrow(sum);
            }
        }
    });
}

/// Fills the row of every choice that has a slot: `fill` takes the token, the index of the choice,
/// and the row. Other rows become zero.
///
/// Each thread owns a block of rows and looks through all slots for those in it, so that slots that
/// two choices share, which [`places`] never assigns, cost nothing but the first one's row.
fn spread<T: Element>(
    pool: &Pool,
    shape: Shape,
    slots: &[u32],
    rows: &mut [T],
    fill: impl Fn(usize, usize, &mut [T]) + Sync,
) {
    let (width, topk) = (shape.tokens.width, shape.topk);
    expect_len("rows", rows.len(), &[shape.regions, shape.region_rows, width]);
    expect_len("slots", slots.len(), &[shape.tokens.rows, topk]);
    let places = shape.regions * shape.region_rows;
    let outside = slots.iter().find(|&&slot| slot != NOWHERE && slot as usize >= places);
    assert!(outside.is_none(), "a place beyond the {places} that there are");
    let block = places.div_ceil(pool.threads());
    pool.for_each_block(places, block, strips(rows, width), |own, rows| {
        rows.fill(T::ZERO);
        for (choice, &slot) in slots.iter().enumerate() {
            if own.contains(&(slot as usize)) {
                let row = (slot as usize - own.start) * width;
                fill(choice / topk, choice % topk, &mut rows[row..row + width]);
            }
        }
    });
}

/// Number of tokens that a thread takes at a time.
fn block(width: usize) -> usize {
    ((1 << 14) / width.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, widen};

    const SHAPE: Shape = Shape {
        tokens: Rows { rows: 4, width: 3 },
        topk: 2,
        experts: 4,
        regions: 2,
        region_rows: 5,
    };
    const CHOICES: [u32; 8] = [3, 0, 1, 3, 3, DROPPED, 0, 2];

    fn placed() -> (Vec<u32>, Vec<u32>) {
        let (mut slots, mut counts, mut starts) = (vec![0; 8], vec![0; 4], vec![0; 4]);
        places(SHAPE, &CHOICES, &mut slots, &mut counts, &mut starts).unwrap();
        (slots, counts)
    }

    #[test]
    fn experts_follow_each_other_and_tokens_keep_their_order() {
        let (slots, counts) = placed();
        assert_eq!(counts, [2, 1, 1, 3]);
        // Region 0: expert 0 with tokens 0 and 3, expert 1 with 1; region 1: 2 with 3, 3 with 0, 1, 2.
        assert_eq!(slots, [6, 0, 2, 7, 8, NOWHERE, 1, 5]);
    }

    #[test]
    fn too_many_tokens_for_a_region_are_told() {
        let (mut slots, mut counts, mut starts) = (vec![0; 8], vec![0; 4], vec![0; 4]);
        let small = Shape { region_rows: 3, ..SHAPE };
        let full = places(small, &CHOICES, &mut slots, &mut counts, &mut starts).unwrap_err();
        let expected = Full { region: 1, tokens: 4, rows: 3, choices: 8, regions: 2 };
        assert_eq!((full, full.factor()), (expected, 1.0));
        assert!(full.to_string().contains("4 tokens go to the experts of part 1"));
        // The last choice of expert 3 has no row: the numbers stay in place.
        assert_eq!(
            (&slots[..], &counts[..]),
            (&[4, 0, 2, 5, NOWHERE, NOWHERE, 1, 3][..], &[2, 1, 1, 2][..])
        );
    }

    #[test]
    fn any_slots_and_threads_give_the_rows_of_one_thread() {
        let x = random("x", 12);
        let (mut one, mut three) = (vec![f32::NAN; 30], vec![f32::NAN; 30]);
        let threads = Pool::new(std::num::NonZeroUsize::new(3).unwrap()).unwrap();
        // The second has slots twice.
        for slots in [placed().0, vec![7, 7, 7, 0, 0, NOWHERE, 9, 9]] {
            scatter(&Pool::single(), SHAPE, &x, &slots, &mut one);
            scatter(&threads, SHAPE, &x, &slots, &mut three);
            assert_eq!(one, three);
        }
        assert_eq!(one[7 * 3..8 * 3], x[3..6], "the last choice of a slot");
    }

    #[test]
    fn tokens_go_and_come_back_and_so_do_gradients() {
        let (slots, _) = placed();
        let pool = Pool::single();
        let (x, gates) = (random("x", 12), random("gates", 8));
        let mut rows = vec![f32::NAN; 30];
        scatter(&pool, SHAPE, &x, &slots, &mut rows);
        assert_eq!(rows[6 * 3..7 * 3], x[..3]);
        assert_eq!(rows[3 * 3..5 * 3], [0.0; 6], "places without a token");

        let combined = |x: &[f64], gates: &[f64]| {
            let mut y = vec![0.0; 12];
            for token in 0..4 {
                for at in (0..2).filter(|at| slots[2 * token + at] != NOWHERE) {
                    for c in 0..3 {
                        y[3 * token + c] += gates[2 * token + at] * x[3 * token + c];
                    }
                }
            }
            y
        };
        let mut y = vec![f32::NAN; 12];
        combine(&pool, SHAPE, &rows, &slots, &gates, &mut y);
        assert_close(&y, &combined(&widen(&x), &widen(&gates)));

        let dy = random("dy", 12);
        let (mut drows, mut dgates, mut dx) =
            (vec![f32::NAN; 30], vec![f32::NAN; 8], vec![0.0; 12]);
        combine_gradient(&pool, SHAPE, &dy, &rows, &slots, &gates, &mut drows, &mut dgates);
        gather(&pool, SHAPE, &drows, &slots, &mut dx);
        let by_x = numeric_gradient(&widen(&x), &widen(&dy), |x| combined(x, &widen(&gates)));
        assert_close(&dx, &by_x);
        let by_gates = numeric_gradient(&widen(&gates), &widen(&dy), |g| combined(&widen(&x), g));
        assert_close(&dgates, &by_gates);
        assert_eq!(dgates[5], 0.0, "what was dropped teaches nothing");
    }
}
