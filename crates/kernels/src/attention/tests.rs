use super::*;
use crate::reference::{assert_close, bits, numeric_gradient, random, widen};
use proptest::prelude::*;

fn reference(s: Shape, qkv: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (d, width) = (s.head_dim, s.width());
    let mut out = vec![0.0; s.batch * s.seq * s.heads * d];
    let mut lse = vec![0.0; s.batch * s.heads * s.seq];
    for b in 0..s.batch {
        for h in 0..s.heads {
            let kv = h * s.kv_heads / s.heads;
            let at = |t: usize, head: usize| &qkv[(b * s.seq + t) * width + head * d..][..d];
            for t in 0..s.seq {
                let seen = s.scores.mask.keys(t, s.seq);
                let score = |u: usize| {
                    let (q, k) = (at(t, h), at(u, s.heads + kv));
                    let dot = q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                    let (scale, cap) = (f64::from(s.scale()), f64::from(s.scores.softcap));
                    let slope = s.scores.alibi.map_or(0.0, |alibi| f64::from(alibi.slope(h)));
                    let score = dot * scale;
                    let bounded = if cap > 0.0 { cap * (score / cap).tanh() } else { score };
                    bounded + slope * (u as f64 - t as f64)
                };
                let sum: f64 = seen.clone().map(|u| score(u).exp()).sum();
                lse[(b * s.heads + h) * s.seq + t] = sum.ln();
                for u in seen {
                    let p = score(u).exp() / sum;
                    let v = at(u, s.heads + s.kv_heads + kv);
                    for i in 0..d {
                        out[((b * s.seq + t) * s.heads + h) * d + i] += p * v[i];
                    }
                }
            }
        }
    }
    (out, lse)
}

struct Run {
    out: Vec<f32>,
    lse: Vec<f32>,
    dqkv: Vec<f32>,
}

fn run(s: Shape, qkv: &[f32], dout: &[f32]) -> Run {
    run_on(1, s, qkv, dout)
}

fn run_on(threads: usize, s: Shape, qkv: &[f32], dout: &[f32]) -> Run {
    let mut out = vec![f32::NAN; dout.len()];
    let mut lse = vec![f32::NAN; s.batch * s.heads * s.seq];
    let mut dqkv = vec![f32::NAN; qkv.len()];
    let pool = Pool::new(threads.try_into().unwrap()).unwrap();
    let mut workspace = vec![f32::NAN; threads * s.forward_workspace::<f32>()];
    forward(&pool, s, qkv, None, &mut out, &mut lse, &mut workspace);
    let mut workspace = vec![f32::NAN; threads * s.backward_workspace::<f32>()];
    backward(&pool, s, dout, qkv, &out, &lse, &mut dqkv, &mut workspace);
    Run { out, lse, dqkv }
}

fn inputs(s: Shape) -> (Vec<f32>, Vec<f32>) {
    let tokens = s.batch * s.seq;
    (random("qkv", tokens * s.width()), random("dout", tokens * s.heads * s.head_dim))
}

/// Scores of every kind.
fn scores() -> impl Strategy<Value = Scores> {
    let masks = prop_oneof![
        Just(Mask::Causal),
        Just(Mask::Full),
        (1usize..5).prop_map(Mask::Window),
        (1usize..5).prop_map(Mask::Chunk),
    ];
    let alibi =
        prop::option::of((4usize..9).prop_map(|heads| Alibi { heads, first: 1, scale: 0.5 }));
    (masks, any::<bool>(), any::<bool>(), alibi).prop_map(|(mask, scaled, capped, alibi)| {
        let scale = if scaled { 0.4 } else { 0.0 };
        Scores { mask, scale, softcap: if capped { 1.5 } else { 0.0 }, alibi }
    })
}

#[test]
fn slopes_are_those_of_the_paper_and_of_bloom() {
    let of = |heads| {
        (0..heads).map(|h| Alibi { heads, first: 0, scale: 1.0 }.slope(h)).collect::<Vec<_>>()
    };
    assert_eq!(of(4), [0.25, 0.0625, 0.015625, 0.00390625]);
    assert_eq!(of(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
}

/// A score of no key is one more key whose value is zero.
#[test]
fn sinks_take_part_in_the_softmax_and_learn() {
    let s =
        Shape { batch: 2, seq: 5, heads: 2, kv_heads: 1, head_dim: 3, scores: Scores::default() };
    let (qkv, dout) = inputs(s);
    let sinks = [0.3f32, -0.7];
    let (lens, pool) = ((dout.len(), s.batch * s.heads * s.seq), Pool::single());
    let run = |sinks: &[f32]| {
        let (mut out, mut lse) = (vec![0.0; lens.0], vec![0.0; lens.1]);
        let mut room = vec![0.0; s.forward_workspace::<f32>()];
        forward(&pool, s, &qkv, Some(sinks), &mut out, &mut lse, &mut room);
        (out, lse)
    };
    let (out, lse) = run(&sinks);
    let (plain, plain_lse) = reference(s, &widen(&qkv));
    let shared: Vec<f64> = plain
        .iter()
        .enumerate()
        .map(|(at, value)| {
            let (row, head) = (at / 6, at / 3 % 2);
            let lse = plain_lse[(row / 5 * 2 + head) * 5 + row % 5];
            value / (1.0 + (f64::from(sinks[head]) - lse).exp())
        })
        .collect();
    assert_close(&out, &shared);
    let mut dsinks = [f32::NAN; 2];
    sink_gradient(s, &dout, &out, &lse, &sinks, &mut dsinks, Write::Overwrite);
    for head in 0..2 {
        let moved = |by: f32| {
            let mut sinks = sinks;
            sinks[head] += by;
            let (out, _) = run(&sinks);
            out.iter().zip(&dout).map(|(o, d)| f64::from(*o) * f64::from(*d)).sum::<f64>()
        };
        let slope = (moved(0.01) - moved(-0.01)) / 0.02;
        assert!((f64::from(dsinks[head]) - slope).abs() < 1e-3, "{dsinks:?} {slope}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn forward_and_backward_agree_with_the_reference(
        batch in 0usize..3, seq in 0usize..7, groups in 1usize..3, kv_heads in 1usize..3,
        head_dim in 1usize..6, scores in scores(),
    ) {
        let s = Shape { batch, seq, heads: groups * kv_heads, kv_heads, head_dim, scores };
        let (qkv, dout) = inputs(s);
        let Run { out, lse, dqkv } = run(s, &qkv, &dout);
        let (expected_out, expected_lse) = reference(s, &widen(&qkv));
        assert_close(&out, &expected_out);
        assert_close(&lse, &expected_lse);
        let expected = numeric_gradient(&widen(&qkv), &widen(&dout), |x| reference(s, x).0);
        assert_close(&dqkv, &expected);
    }
}

/// Several blocks of queries, the last one short: gradients are checked along one direction.
#[test]
fn sequences_longer_than_a_block_agree_with_the_reference() {
    for mask in [Mask::Causal, Mask::Full, Mask::Window(70), Mask::Chunk(50)] {
        let seq = 2 * BLOCK + 9;
        let alibi = (mask == Mask::Causal).then_some(Alibi { heads: 6, first: 2, scale: 1.0 });
        let scores = Scores { mask, softcap: 3.0, alibi, ..Scores::default() };
        let s = Shape { batch: 1, seq, heads: 4, kv_heads: 2, head_dim: 5, scores };
        let (qkv, dout) = inputs(s);
        let Run { out, lse, dqkv } = run(s, &qkv, &dout);
        let wide = widen(&qkv);
        let (expected_out, expected_lse) = reference(s, &wide);
        assert_close(&out, &expected_out);
        assert_close(&lse, &expected_lse);

        for name in ["a", "b", "c"] {
            let direction = widen(&random(name, qkv.len()));
            let along = |t: &[f64]| {
                let x: Vec<f64> = wide.iter().zip(&direction).map(|(x, d)| x + t[0] * d).collect();
                reference(s, &x).0
            };
            let expected = numeric_gradient(&[0.0], &widen(&dout), along)[0];
            let actual: f64 = dqkv.iter().zip(&direction).map(|(&g, d)| f64::from(g) * d).sum();
            assert!(
                (actual - expected).abs() < 1e-4 * expected.abs().max(1.0),
                "{actual} {expected}"
            );
        }
    }
}

#[test]
fn a_sequence_does_not_depend_on_the_batch_around_it() {
    let s =
        Shape { batch: 3, seq: 70, heads: 2, kv_heads: 1, head_dim: 8, scores: Scores::default() };
    let (qkv, dout) = inputs(s);
    let all = run(s, &qkv, &dout);
    let one = Shape { batch: 1, ..s };
    let (n, m) = (70 * s.width(), 70 * 16);
    let second = run(one, &qkv[n..2 * n], &dout[m..2 * m]);
    assert_eq!(bits(&second.out), bits(&all.out[m..2 * m]));
    assert_eq!(bits(&second.lse), bits(&all.lse[2 * 70..4 * 70]));
    assert_eq!(bits(&second.dqkv), bits(&all.dqkv[n..2 * n]));
}

#[test]
fn threads_do_not_change_a_bit() {
    for kv_heads in [1, 3] {
        let s =
            Shape { batch: 2, seq: 90, heads: 3, kv_heads, head_dim: 8, scores: Scores::default() };
        let (qkv, dout) = inputs(s);
        let alone = run(s, &qkv, &dout);
        let shared = run_on(3, s, &qkv, &dout);
        assert_eq!(bits(&shared.out), bits(&alone.out));
        assert_eq!(bits(&shared.lse), bits(&alone.lse));
        assert_eq!(bits(&shared.dqkv), bits(&alone.dqkv));
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let s =
        Shape { batch: 1, seq: 5, heads: 1, kv_heads: 1, head_dim: 2, scores: Scores::default() };
    let (mut qkv, dout) = inputs(s);
    qkv.iter_mut().for_each(|x| *x *= 300.0);
    let Run { out, lse, dqkv } = run(s, &qkv, &dout);
    assert!(out.iter().chain(&lse).chain(&dqkv).all(|v| v.is_finite()));
}

#[test]
#[should_panic(expected = "3 query heads cannot share 2 key heads equally")]
fn uneven_groups_are_refused() {
    let s =
        Shape { batch: 0, seq: 0, heads: 3, kv_heads: 2, head_dim: 1, scores: Scores::default() };
    forward::<f32>(&Pool::single(), s, &[], None, &mut [], &mut [], &mut []);
}
