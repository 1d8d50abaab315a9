use super::*;
use crate::reference::{assert_close, random, widen};

/// The token positions that a rank holds.
fn zigzag(rank: usize, ranks: usize, seq: usize) -> Vec<usize> {
    let run = seq / (2 * ranks);
    let of = |index: usize| index * run..(index + 1) * run;
    of(rank).chain(of(2 * ranks - 1 - rank)).collect()
}

/// A rank's shard of a tensor of shape `[batch, seq, width]`.
fn dealt(all: &[f32], batch: usize, positions: &[usize], seq: usize, width: usize) -> Vec<f32> {
    let mut part = Vec::new();
    for sequence in 0..batch {
        for &position in positions {
            part.extend_from_slice(&all[(sequence * seq + position) * width..][..width]);
        }
    }
    part
}

/// The steps of all ranks equal attention over the whole sequence, forward and backward.
#[test]
fn the_ring_is_attention_over_the_whole_sequence() {
    for (ranks, seq, kv_heads) in [(1, 6, 1), (2, 12, 2), (3, 18, 1), (2, 4 * BLOCK + 8, 2)] {
        let (batch, heads, head_dim) = (2, 2, 6);
        let whole = attention::Shape {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            scores: attention::Scores::default(),
        };
        let (fused, stride) = ((heads + 2 * kv_heads) * head_dim, heads * head_dim);
        let kv_width = 2 * kv_heads * head_dim;
        let qkv = random("qkv", batch * seq * fused);
        let dout = random("dout", batch * seq * stride);
        let pool = Pool::single();
        let mut out = vec![0.0; dout.len()];
        let mut lse = vec![0.0; batch * heads * seq];
        let mut dqkv = vec![0.0; qkv.len()];
        let mut room =
            vec![0.0; whole.backward_workspace::<f32>().max(whole.forward_workspace::<f32>())];
        let used = whole.forward_workspace::<f32>();
        attention::forward(&pool, whole, &qkv, None, &mut out, &mut lse, &mut room[..used]);
        let used = whole.backward_workspace::<f32>();
        let room = &mut room[..used];
        attention::backward(&pool, whole, &dout, &qkv, &out, &lse, &mut dqkv, room);

        let own = seq / ranks;
        let part = attention::Shape { seq: own, ..whole };
        let held: Vec<Vec<usize>> = (0..ranks).map(|rank| zigzag(rank, ranks, seq)).collect();
        let qkvs: Vec<_> = held.iter().map(|at| dealt(&qkv, batch, at, seq, fused)).collect();
        let kvs: Vec<Vec<f32>> = qkvs
            .iter()
            .map(|qkv| {
                let mut kv = vec![0.0; batch * own * kv_width];
                keys_and_values(kv_width, qkv, &mut kv);
                kv
            })
            .collect();
        let mut dkvs = vec![vec![0.0; batch * own * kv_width]; ranks];
        let mut dqkvs = Vec::new();
        for rank in 0..ranks {
            let mut room = vec![0.0; part.forward_workspace::<f32>()];
            let mut found = vec![0.0; batch * own * stride];
            let mut sums = vec![0.0; batch * heads * own];
            attention::forward(&pool, part, &qkvs[rank], None, &mut found, &mut sums, &mut room);
            let others: Vec<usize> = (1..ranks).map(|step| (rank + ranks - step) % ranks).collect();
            let which = |o: usize| if o < rank { Other::Earlier } else { Other::Later };
            let mut room = vec![0.0; forward_workspace(part)];
            for &o in &others {
                let (out, lse) = (&mut found, &mut sums);
                forward(&pool, part, which(o), &qkvs[rank], &kvs[o], out, lse, &mut room);
            }
            let expected = dealt(&out, batch, &held[rank], seq, stride);
            assert_close(&found, &widen(&expected));

            let douts = dealt(&dout, batch, &held[rank], seq, stride);
            let mut dqkv = vec![0.0; qkvs[rank].len()];
            let mut room = vec![0.0; part.backward_workspace::<f32>()];
            let (qkv, grad) = (&qkvs[rank], &mut dqkv);
            attention::backward(&pool, part, &douts, qkv, &found, &sums, grad, &mut room);
            let mut room = vec![0.0; backward_workspace(part)];
            for &o in &others {
                backward(
                    &pool,
                    part,
                    which(o),
                    &douts,
                    qkv,
                    &kvs[o],
                    &found,
                    &sums,
                    &mut dqkv,
                    &mut dkvs[o],
                    Write::Accumulate,
                    &mut room,
                );
            }
            dqkvs.push(dqkv);
        }
        for rank in 0..ranks {
            add_keys_and_values(kv_width, &dkvs[rank], &mut dqkvs[rank]);
            let expected = dealt(&dqkv, batch, &held[rank], seq, fused);
            assert_close(&dqkvs[rank], &widen(&expected));
        }
    }
}
