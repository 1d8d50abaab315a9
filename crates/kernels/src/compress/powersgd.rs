//! PowerSGD: a matrix as the product of two narrow ones, by one step of subspace iteration (Vogels
//! et al., arXiv 1905.13727, algorithm 1).
//!
//! A matrix M has `rows` × `columns` elements. Its left factor P is stored row by row, with `rank`
//! elements per row. Its right factor Q is stored direction by direction, with `columns` elements
//! for each of the `rank` directions. So all inner loops run along rows of M.

use crate::Element;
use crate::instruction_set::vectorised;
use crate::ordered_sum;
use crate::pool::{Pool, strips};
use crate::shape::expect_len;

/// Number of rows that a thread takes at a time.
const TILE: usize = 16;

/// P = M·Q.
pub fn left(pool: &Pool, columns: usize, rank: usize, m: &[f32], q: &[f32], p: &mut [f32]) {
    let rows = m.len() / columns;
    expect_len("q", q.len(), &[rank, columns]);
    pool.for_each_block(rows, TILE, strips(p, rank), |at, p| {
        vectorised(
            #[inline(always)]
            || {
                for (row, p) in at.zip(p.chunks_exact_mut(rank)) {
                    let m = &m[row * columns..(row + 1) * columns];
                    for (p, q) in p.iter_mut().zip(q.chunks_exact(columns)) {
                        *p = ordered_sum::sum([m, q], |[m, q]| m * q);
                    }
                }
            },
        );
    });
}

/// Orthonormalises the columns of P, one after the other (modified Gram–Schmidt). A column that
/// depends linearly on earlier ones becomes zero.
pub fn orthonormalise(rank: usize, p: &mut [f32]) {
    let column = |p: &[f32], k: usize, other: usize| -> f64 {
        p.chunks_exact(rank).map(|row| f64::from(row[k]) * f64::from(row[other])).sum()
    };
    for k in 0..rank {
        let before = column(p, k, k).sqrt();
        // Twice: the second pass removes the rounding error that the first leaves.
        for other in (0..k).chain(0..k) {
            let share = column(p, k, other) as f32;
            p.chunks_exact_mut(rank).for_each(|row| row[k] -= share * row[other]);
        }
        let length = column(p, k, k).sqrt();
        let inverse = if length > 1e-6 * before { (1.0 / length) as f32 } else { 0.0 };
        p.chunks_exact_mut(rank).for_each(|row| row[k] *= inverse);
    }
}

/// Q = Mᵀ·P.
pub fn right(pool: &Pool, columns: usize, rank: usize, m: &[f32], p: &[f32], q: &mut [f32]) {
    expect_len("p", p.len(), &[m.len() / columns, rank]);
    pool.for_each_block(rank, 1, strips(q, columns), |at, q| {
        vectorised(
            #[inline(always)]
            || {
                q.fill(0.0);
                for (m, p) in m.chunks_exact(columns).zip(p.chunks_exact(rank)) {
                    let share = p[at.start];
                    for (q, m) in q.iter_mut().zip(m) {
                        *q += share * m;
                    }
                }
            },
        );
    });
}

/// M −= P·Qᵀ: the residual that the factors do not represent.
pub fn residue(pool: &Pool, columns: usize, rank: usize, p: &[f32], q: &[f32], m: &mut [f32]) {
    let rows = m.len() / columns;
    pool.for_each_block(rows, TILE, strips(m, columns), |at, m| {
        vectorised(
            #[inline(always)]
            || {
                for (row, m) in at.zip(m.chunks_exact_mut(columns)) {
                    let p = &p[row * rank..(row + 1) * rank];
                    for (share, q) in p.iter().zip(q.chunks_exact(columns)) {
                        for (m, q) in m.iter_mut().zip(q) {
                            *m -= share * q;
                        }
                    }
                }
            },
        );
    });
}

/// M = P·Qᵀ.
pub fn product<G: Element>(
    pool: &Pool,
    columns: usize,
    rank: usize,
    p: &[f32],
    q: &[f32],
    m: &mut [G],
) {
    let rows = m.len() / columns;
    pool.for_each_block(rows, TILE, strips(m, columns), |at, m| {
        vectorised(
            #[inline(always)]
            || {
                for (row, m) in at.zip(m.chunks_exact_mut(columns)) {
                    let p = &p[row * rank..(row + 1) * rank];
                    for (at, m) in m.iter_mut().enumerate() {
                        let terms = p.iter().enumerate().map(|(k, p)| p * q[k * columns + at]);
                        *m = G::narrow(terms.sum());
                    }
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::Stream;

    fn random(name: &str, len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        Stream::new(7, name).fill_normal(0, 0.0, 1.0, &mut values);
        values
    }

    /// Runs one step on a matrix. Returns the left factor and the residual.
    fn step(columns: usize, rank: usize, m: &[f32], q: &mut [f32]) -> (Vec<f32>, Vec<f32>) {
        let pool = Pool::single();
        let mut p = vec![f32::NAN; m.len() / columns * rank];
        left(&pool, columns, rank, m, q, &mut p);
        orthonormalise(rank, &mut p);
        right(&pool, columns, rank, m, &p, q);
        let mut rest = m.to_vec();
        residue(&pool, columns, rank, &p, q, &mut rest);
        (p, rest)
    }

    fn length(x: &[f32]) -> f32 {
        x.iter().map(|x| x * x).sum::<f32>().sqrt()
    }

    #[test]
    fn a_matrix_of_low_rank_is_said_whole() {
        let (rows, columns, rank) = (20, 33, 3);
        let (a, b) = (random("a", rows * rank), random("b", rank * columns));
        let mut m = vec![0.0f32; rows * columns];
        product(&Pool::single(), columns, rank, &a, &b, &mut m);
        let mut q = random("q", rank * columns);
        let (p, rest) = step(columns, rank, &m, &mut q);
        assert!(length(&rest) < 1e-4 * length(&m), "{}", length(&rest));
        let mut again = vec![0.0f32; m.len()];
        product(&Pool::single(), columns, rank, &p, &q, &mut again);
        let off: Vec<f32> = again.iter().zip(&m).map(|(a, b)| a - b).collect();
        assert!(length(&off) < 1e-4 * length(&m));
    }

    #[test]
    fn steps_that_start_where_the_last_one_ended_get_better() {
        let (columns, rank, m) = (24, 2, random("m", 24 * 24));
        let mut q = random("q", rank * columns);
        let rests: Vec<f32> = (0..12).map(|_| length(&step(columns, rank, &m, &mut q).1)).collect();
        assert!(rests.windows(2).all(|w| w[1] <= w[0] * 1.0001), "{rests:?}");
        assert!(rests[11] < 0.98 * rests[0]);
    }

    #[test]
    fn columns_are_orthonormal_and_dependent_ones_vanish() {
        let (rows, rank) = (40, 4);
        let mut p = random("p", rows * rank);
        // The third column is the sum of the first two.
        p.chunks_exact_mut(rank).for_each(|row| row[2] = row[0] + row[1]);
        orthonormalise(rank, &mut p);
        let dot = |a: usize, b: usize| -> f32 { p.chunks(rank).map(|row| row[a] * row[b]).sum() };
        for a in 0..rank {
            for b in 0..rank {
                let expected = if a == b && a != 2 { 1.0 } else { 0.0 };
                assert!((dot(a, b) - expected).abs() < 1e-4, "{a} {b}: {}", dot(a, b));
            }
        }
    }
}
