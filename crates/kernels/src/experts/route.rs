//! Expert routing: the experts of each token, their weights, and the load-balancing loss.
//!
//! A token's `topk` experts are those with the largest scores. Their weights are their scores,
//! divided by the sum of those chosen (Jiang et al., Mixtral, arXiv 2401.04088, section 2.1;
//! DeepSeek-V3, arXiv 2412.19437, eq. 13). A single expert's weight is its score (Fedus et al.,
//! Switch Transformer, arXiv 2101.03961, eq. 2): otherwise the router would get no gradient.
//!
//! Experts may be grouped, and a token's experts then come from few groups: those whose two best
//! scores have the largest sum (DeepSeek-V3, section 2.1.2, node-limited routing, as in its
//! published code).
//!
//! The balancing loss is that of DeepSeek-V3, eq. 17 to 20, for every sequence separately: the sum
//! over experts of f·P, with f the expert's share of the choices relative to an equal one and P its
//! mean normalised score.

use crate::Element;
use crate::math::{exp, sigmoid};
use crate::ordered_sum;
use crate::shape::{Write, expect_len};
use std::ops::Range;

/// Bit set in a dropped choice; the other bits are the expert.
pub const DROPPED: u32 = 1 << 31;

/// Parameters of the routing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Number of experts.
    pub experts: usize,
    /// Number of experts per token.
    pub topk: usize,
    /// True if scores are sigmoids, false for a softmax.
    pub sigmoid: bool,
    /// Sum of the weights of a token's experts.
    pub scale: f32,
    /// Number of tokens per sequence.
    pub seq: usize,
    /// Maximum number of tokens of a sequence per expert, if bounded.
    pub capacity: Option<usize>,
    /// Weight of a sequence's imbalance in the loss.
    pub balance: f32,
    /// Number of groups of equally many consecutive experts.
    pub groups: usize,
    /// Number of groups that a token's experts come from.
    pub kept_groups: usize,
    /// Number of shards of sequences in zigzag layout. Rows are stored shard by shard, and within a
    /// shard sequence by sequence: of each a run from the front and one from the end.
    pub parts: usize,
    /// True if the weights of a token's experts are their scores, not divided by their sum.
    pub raw: bool,
    /// True if a group is judged by its best expert instead of its best two.
    pub best_of_group: bool,
}

impl Routing {
    /// Sizes of a [`Room`]: number of integers, and of floats.
    pub fn room(&self) -> (usize, usize) {
        let choices = self.seq.saturating_mul(self.topk);
        (choices.saturating_add(self.experts), self.experts.saturating_add(self.groups))
    }

    /// Number of consecutive rows per sequence.
    fn each(&self) -> usize {
        (self.seq / self.parts.max(1)).max(1)
    }

    /// Row of a sequence's token, among `rows` rows.
    fn row(&self, rows: usize, sequence: usize, token: usize) -> usize {
        if self.parts <= 1 {
            return sequence * self.seq + token;
        }
        let (each, sequences) = (self.each(), rows / self.seq.max(1));
        let run = (each / 2).max(1);
        let (at, last) = (token / run, 2 * self.parts - 1);
        let (part, behind) = if at < self.parts { (at, 0) } else { (last - at, run) };
        (part * sequences + sequence) * each + behind + token % run
    }

    /// Token index of a row within its sequence, among `rows` rows.
    fn token(&self, rows: usize, row: usize) -> usize {
        let (each, at) = (self.each(), row % self.each());
        if self.parts <= 1 {
            return at;
        }
        let (part, run) = (row / (rows / self.parts).max(1), (each / 2).max(1));
        let runs = if at < run { part } else { 2 * self.parts - 1 - part };
        runs * run + at % run
    }

    /// Sequences of the rows `own` of one shard, each with its rows among them.
    fn sequences(
        &self,
        rows: usize,
        own: &Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let each = self.each();
        let of_part = (rows / self.parts.max(1)).max(1);
        let part = own.start / of_part * of_part;
        let own = own.clone();
        let first = (own.start - part) / each;
        let last = if own.is_empty() { first } else { (own.end - part).div_ceil(each) };
        (first..last).map(move |sequence| {
            let start = part + sequence * each;
            (sequence, start.max(own.start)..(start + each).min(own.end))
        })
    }
}

/// Workspace for the choices of a whole sequence.
#[derive(Debug)]
pub struct Room<'a> {
    /// Integers, of the size given by [`Routing::room`].
    pub whole: &'a mut [u32],
    /// Floats, likewise.
    pub floats: &'a mut [f32],
}

/// Chooses experts for the rows `own` of `logits`, which holds whole sequences: `choices` and
/// `gates` are `[own, topk]`. Returns the number of dropped choices.
///
/// First choices take precedence over second ones, and earlier tokens over later ones. `bias` is
/// added to the scores of a sigmoid only for the choice.
pub fn forward<T: Element>(
    routing: Routing,
    own: Range<usize>,
    logits: &[T],
    bias: Option<&[T]>,
    choices: &mut [u32],
    gates: &mut [f32],
    mut room: Room<'_>,
) -> u64 {
    let Routing { experts, topk, .. } = routing;
    expect_len("choices", choices.len(), &[own.len(), topk]);
    expect_len("gates", gates.len(), &[own.len(), topk]);
    let mut dropped = 0;
    let rows = logits.len() / experts.max(1);
    for (sequence, of_sequence) in routing.sequences(rows, &own) {
        let Room { whole, floats } = &mut room;
        let (chosen, counts) = choose(routing, sequence, logits, bias, whole, floats);
        if let Some(capacity) = routing.capacity {
            drop_beyond(capacity, topk, chosen, counts);
        }
        for row in of_sequence {
            let chosen = &chosen[routing.token(rows, row) * topk..][..topk];
            let at = (row - own.start) * topk..(row - own.start + 1) * topk;
            choices[at.clone()].copy_from_slice(chosen);
            dropped += chosen.iter().filter(|&&choice| choice & DROPPED != 0).count() as u64;
            weights(routing, &logits[row * experts..][..experts], chosen, &mut gates[at]);
        }
    }
    dropped
}

/// Gradient of the logits of the rows `own`, from the gradient of their gates and from the
/// balancing loss. The latter is multiplied by `loss_scale` like the other gradients.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn input_gradient<T: Element>(
    routing: Routing,
    own: Range<usize>,
    dgates: &[f32],
    logits: &[T],
    bias: Option<&[T]>,
    dlogits: &mut [T],
    loss_scale: f32,
    mut room: Room<'_>,
) {
    let Routing { experts, topk, seq, .. } = routing;
    expect_len("dgates", dgates.len(), &[own.len(), topk]);
    expect_len("dlogits", dlogits.len(), &[own.len(), experts]);
    let rows = logits.len() / experts.max(1);
    for (sequence, of_sequence) in routing.sequences(rows, &own) {
        let Room { whole, floats } = &mut room;
        let (chosen, counts) = choose(routing, sequence, logits, bias, whole, floats);
        // Weight of a normalised score: balance · f / T, eq. 17 and 18.
        let share = experts as f32 / (topk * seq) as f32;
        let weight = routing.balance * loss_scale * share / seq as f32;
        for row in of_sequence {
            let logits = &logits[row * experts..][..experts];
            let chosen = &chosen[routing.token(rows, row) * topk..][..topk];
            let dgates = &dgates[(row - own.start) * topk..][..topk];
            let floats = &mut floats[..experts];
            scores(routing, logits, floats);
            let dlogits = &mut dlogits[(row - own.start) * experts..][..experts];
            let normal = 1.0 / floats.iter().sum::<f32>();
            let mean: f32 = floats.iter().zip(&*counts).map(|(&s, &n)| s * n as f32).sum();
            let (mean, picked) = (mean * normal, Picked::of(routing, chosen, dgates, floats));
            for (expert, dlogit) in dlogits.iter_mut().enumerate() {
                let score = floats[expert];
                // Derivative by the score: of the balancing loss, and of the gates.
                let mut by_score = weight * (counts[expert] as f32 - mean) * normal;
                if let Some(at) = chosen.iter().position(|&choice| choice as usize == expert) {
                    by_score += picked.by_score(dgates[at]);
                }
                // Derivative by the logit: a softmax's scores are proportional to exponentials; its
                // normalisation is subtracted above.
                let slope = if routing.sigmoid { score * (1.0 - score) } else { score };
                let whole = if routing.sigmoid { 0.0 } else { picked.whole(normal) };
                *dlogit = T::narrow((by_score - whole) * slope);
            }
        }
    }
}

/// `dbias (+)=` `factor` times each expert's excess over an equal share of the choices. It is not a
/// gradient of the loss, but lowers the bias of overloaded experts (DeepSeek-V3, arXiv 2412.19437,
/// section 2.1.2).
pub fn bias_gradient<G: Element>(
    choices: &[u32],
    factor: f32,
    dbias: &mut [G],
    mode: Write,
    counts: &mut [u32],
) {
    count(choices, counts);
    let equal = choices.len() as f32 / dbias.len().max(1) as f32;
    for (dbias, &count) in dbias.iter_mut().zip(&*counts) {
        *dbias = G::narrow(mode.start(*dbias) + factor * (count as f32 - equal));
    }
}

/// Choices of all tokens of a sequence, and the number of tokens per expert.
fn choose<'r, T: Element>(
    routing: Routing,
    sequence: usize,
    logits: &[T],
    bias: Option<&[T]>,
    whole: &'r mut [u32],
    floats: &mut [f32],
) -> (&'r mut [u32], &'r mut [u32]) {
    let Routing { experts, topk, seq, .. } = routing;
    let (chosen, counts) = whole.split_at_mut(seq * topk);
    let counts = &mut counts[..experts];
    let rows = logits.len() / experts.max(1);
    for (token, chosen) in chosen.chunks_exact_mut(topk).take(seq).enumerate() {
        let (keys, groups) = floats.split_at_mut(experts);
        let row = routing.row(rows, sequence, token);
        let logits = &logits[row * experts..][..experts];
        match bias {
            Some(bias) => {
                for ((key, logit), bias) in keys.iter_mut().zip(logits).zip(bias) {
                    *key = sigmoid(logit.widen()) + bias.widen();
                }
            }
            None => {
                for (key, logit) in keys.iter_mut().zip(logits) {
                    *key = logit.widen();
                }
            }
        }
        if routing.kept_groups < routing.groups {
            let (kept, two) = (routing.kept_groups, !routing.best_of_group);
            keep_groups(kept, two, keys, &mut groups[..routing.groups]);
        }
        largest(keys, chosen);
    }
    count(chosen, counts);
    (chosen, counts)
}

/// Restricts the choice to the `kept` groups whose largest key, or whose `two` largest keys, have the
/// largest sum; of equal ones the first.
fn keep_groups(kept: usize, two: bool, keys: &mut [f32], sums: &mut [f32]) {
    let each = (keys.len() / sums.len().max(1)).max(1);
    for (sum, keys) in sums.iter_mut().zip(keys.chunks_exact(each)) {
        let (mut best, mut next) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &key in keys {
            if key > best {
                (best, next) = (key, best);
            } else if key > next {
                next = key;
            }
        }
        *sum = best + if two && each > 1 { next } else { 0.0 };
    }
    for group in 0..sums.len() {
        let before = |other: &usize| {
            sums[*other] > sums[group] || (sums[*other] == sums[group] && *other < group)
        };
        if (0..sums.len()).filter(before).count() >= kept {
            keys[group * each..(group + 1) * each].fill(f32::NEG_INFINITY);
        }
    }
}

/// Indices of the largest keys, in descending order; of equal ones the first.
fn largest(keys: &[f32], chosen: &mut [u32]) {
    for at in 0..chosen.len() {
        let mut best = None;
        for (position, &key) in keys.iter().enumerate() {
            if chosen[..at].contains(&(position as u32)) {
                continue;
            }
            if best.is_none_or(|(_, most)| key > most) {
                best = Some((position as u32, key));
            }
        }
        chosen[at] = best.map_or(0, |(position, _)| position);
    }
}

fn count(choices: &[u32], counts: &mut [u32]) {
    counts.fill(0);
    for choice in choices {
        counts[(choice & !DROPPED) as usize] += 1;
    }
}

/// Marks the choices that exceed an expert's capacity as dropped.
fn drop_beyond(capacity: usize, topk: usize, chosen: &mut [u32], counts: &mut [u32]) {
    counts.fill(0);
    for place in 0..topk {
        for choice in chosen[place..].iter_mut().step_by(topk) {
            let taken = &mut counts[*choice as usize];
            if (*taken as usize) < capacity {
                *taken += 1;
            } else {
                *choice |= DROPPED;
            }
        }
    }
}

/// Scores of all experts for a token, up to a common factor for a softmax.
fn scores<T: Element>(routing: Routing, logits: &[T], scores: &mut [f32]) {
    if routing.sigmoid {
        for (score, logit) in scores.iter_mut().zip(logits) {
            *score = sigmoid(logit.widen());
        }
        return;
    }
    let max = ordered_sum::max(logits);
    for (score, logit) in scores.iter_mut().zip(logits) {
        *score = exp(logit.widen() - max);
    }
}

/// Weights of a token's experts.
fn weights<T: Element>(routing: Routing, logits: &[T], chosen: &[u32], gates: &mut [f32]) {
    let expert = |choice: u32| (choice & !DROPPED) as usize;
    let max = if routing.sigmoid { 0.0 } else { ordered_sum::max(logits) };
    let score = |logit: &T| match routing.sigmoid {
        true => sigmoid(logit.widen()),
        false => exp(logit.widen() - max),
    };
    for (gate, &choice) in gates.iter_mut().zip(chosen) {
        *gate = score(&logits[expert(choice)]);
    }
    // A raw sigmoid score is not divided; a raw softmax score is a share of all.
    let sum: f32 = match (routing.raw || gates.len() == 1, routing.sigmoid) {
        (true, true) => 1.0,
        (true, false) => logits.iter().map(score).sum(),
        _ => gates.iter().sum(),
    };
    let factor = routing.scale / sum;
    gates.iter_mut().for_each(|gate| *gate *= factor);
}

/// Constants that convert the gates' gradients to those of the scores.
struct Picked {
    /// Factor of a gate's gradient.
    factor: f32,
    /// Weighted mean of the gates' gradients, if gates are divided by the sum of the chosen scores.
    mean: f32,
    /// Sum of the gradients of a softmax's raw gates, weighted with the scores.
    single: f32,
}

impl Picked {
    fn of(routing: Routing, chosen: &[u32], dgates: &[f32], scores: &[f32]) -> Self {
        let score = |&choice: &u32| scores[choice as usize];
        let sum: f32 = chosen.iter().map(score).sum();
        let weighted: f32 = chosen.iter().zip(dgates).map(|(c, d)| score(c) * d).sum();
        match (routing.raw || chosen.len() == 1, routing.sigmoid) {
            (true, true) => Self { factor: routing.scale, mean: 0.0, single: 0.0 },
            (true, false) => {
                let all: f32 = scores.iter().sum();
                let factor = routing.scale / all;
                Self { factor, mean: 0.0, single: weighted * factor }
            }
            _ => Self { factor: routing.scale / sum, mean: weighted / sum, single: 0.0 },
        }
    }

    fn by_score(&self, dgate: f32) -> f32 {
        self.factor * (dgate - self.mean)
    }

    /// Term that every score loses because a softmax's scores add up to one.
    fn whole(&self, normal: f32) -> f32 {
        self.single * normal
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_within, numeric_gradient, random, widen};

    const ROUTING: Routing = Routing {
        experts: 5,
        topk: 2,
        sigmoid: false,
        scale: 1.5,
        seq: 6,
        capacity: None,
        balance: 0.0,
        groups: 1,
        kept_groups: 1,
        parts: 1,
        raw: false,
        best_of_group: false,
    };

    /// Choices, gates and number of dropped choices for the rows `own`.
    fn routed(
        routing: Routing,
        own: Range<usize>,
        logits: &[f32],
        bias: Option<&[f32]>,
    ) -> (Vec<u32>, Vec<f32>, u64) {
        let (mut choices, mut gates) =
            (vec![0; own.len() * routing.topk], vec![f32::NAN; own.len() * routing.topk]);
        let (whole, floats) = routing.room();
        let (mut whole, mut floats) = (vec![0; whole], vec![0.0; floats]);
        let room = Room { whole: &mut whole, floats: &mut floats };
        let dropped = forward(routing, own, logits, bias, &mut choices, &mut gates, room);
        (choices, gates, dropped)
    }

    /// Gates by their definition, and the balancing loss of all sequences as the last result.
    fn reference(routing: Routing, choices: &[u32], logits: &[f64]) -> Vec<f64> {
        let Routing { experts, topk, seq, scale, .. } = routing;
        let rows = logits.len() / experts;
        let all: Vec<Vec<f64>> = logits
            .chunks(experts)
            .map(|row| match routing.sigmoid {
                true => row.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
                false => {
                    let sum: f64 = row.iter().map(|l| l.exp()).sum();
                    row.iter().map(|l| l.exp() / sum).collect()
                }
            })
            .collect();
        let mut out = Vec::new();
        for (scores, chosen) in all.iter().zip(choices.chunks(topk)) {
            let of = |c: &u32| scores[*c as usize];
            let sum: f64 = if topk == 1 { 1.0 } else { chosen.iter().map(of).sum() };
            out.extend(chosen.iter().map(|c| f64::from(scale) * of(c) / sum));
        }
        let mut balance = 0.0;
        for sequence in 0..rows / seq {
            let rows = sequence * seq..(sequence + 1) * seq;
            for expert in 0..experts {
                let chosen = &choices[rows.start * topk..rows.end * topk];
                let count = chosen.iter().filter(|&&c| c as usize == expert).count();
                let f = experts as f64 * count as f64 / (topk * seq) as f64;
                let p: f64 =
                    rows.clone().map(|r| all[r][expert] / all[r].iter().sum::<f64>()).sum();
                balance += f * p / seq as f64;
            }
        }
        out.push(balance);
        out
    }

    #[test]
    fn gates_and_gradients_agree_with_the_reference() {
        for (topk, sigmoid, balance) in
            [(2, false, 0.0), (2, false, 0.3), (3, true, 0.2), (1, false, 0.1), (1, true, 0.0)]
        {
            let routing = Routing { topk, sigmoid, balance, ..ROUTING };
            let (rows, experts) = (2 * routing.seq, routing.experts);
            let logits = random("logits", rows * experts);
            let (choices, gates, dropped) = routed(routing, 0..rows, &logits, None);
            assert_eq!(dropped, 0);
            let expected = reference(routing, &choices, &widen(&logits));
            assert_within(&gates, &expected[..gates.len()], 1e-6);

            let dgates = random("dgates", rows * topk);
            let (whole, floats) = routing.room();
            let (mut whole, mut floats) = (vec![0; whole], vec![0.0; floats]);
            let mut dlogits = vec![f32::NAN; rows * experts];
            let room = Room { whole: &mut whole, floats: &mut floats };
            let scale = 4.0;
            input_gradient(routing, 0..rows, &dgates, &logits, None, &mut dlogits, scale, room);
            let mut dy = widen(&dgates);
            dy.push(f64::from(balance * scale));
            let expected = numeric_gradient(&widen(&logits), &dy, |logits| {
                reference(routing, &choices, logits)
            });
            assert_within(&dlogits, &expected, 2e-5);
        }
    }

    #[test]
    fn a_part_of_the_rows_gets_what_the_whole_would() {
        let routing = Routing { capacity: Some(3), balance: 0.1, ..ROUTING };
        let (rows, topk) = (3 * routing.seq, routing.topk);
        let logits = random("logits", rows * routing.experts);
        let (choices, gates, dropped) = routed(routing, 0..rows, &logits, None);
        assert!(dropped > 0);
        let mut sum = 0;
        for part in 0..9 {
            let own = part * rows / 9..(part + 1) * rows / 9;
            let at = own.start * topk..own.end * topk;
            let (some, some_gates, dropped) = routed(routing, own, &logits, None);
            assert_eq!((&some[..], &some_gates[..]), (&choices[at.clone()], &gates[at]));
            sum += dropped;
        }
        assert_eq!(sum, dropped);
    }

    /// Sequences sharded over ranks in zigzag layout are routed like unsharded ones.
    #[test]
    fn where_tokens_stand_does_not_matter() {
        let (sequences, parts) = (3, 2);
        let seq = 8;
        let routing = Routing { seq, capacity: Some(3), balance: 0.1, ..ROUTING };
        let (topk, experts, rows) = (routing.topk, routing.experts, sequences * seq);
        let logits = random("logits", rows * experts);
        let (choices, gates, dropped) = routed(routing, 0..rows, &logits, None);
        let dealt = Routing { parts, ..routing };
        // Two tokens from the front, and their mirror images from the end.
        let tokens = [[0, 1, 6, 7], [2, 3, 4, 5]];
        let mut order = Vec::new();
        for tokens in tokens {
            order.extend((0..sequences).flat_map(|s| tokens.map(|token| s * seq + token)));
        }
        let lying: Vec<f32> =
            order.iter().flat_map(|&row| logits[row * experts..][..experts].to_vec()).collect();
        let gradient = |routing: Routing, own: Range<usize>, logits: &[f32]| {
            let (whole, floats) = routing.room();
            let (mut whole, mut floats) = (vec![0; whole], vec![0.0; floats]);
            let room = Room { whole: &mut whole, floats: &mut floats };
            let (dgates, len) = (vec![0.5; own.len() * topk], own.len() * experts);
            let mut dlogits = vec![f32::NAN; len];
            input_gradient(routing, own, &dgates, logits, None, &mut dlogits, 1.0, room);
            dlogits
        };
        let whole = gradient(routing, 0..rows, &logits);
        let mut sum = 0;
        // Halves of shards, as held by ranks that share a shard's tokens.
        for own in [0..6, 6..12, 12..18, 18..24] {
            let (some, some_gates, dropped) = routed(dealt, own.clone(), &lying, None);
            let parts_of = gradient(dealt, own.clone(), &lying);
            for (at, row) in own.enumerate() {
                let token = order[row];
                assert_eq!(some[at * topk..][..topk], choices[token * topk..][..topk]);
                assert_eq!(some_gates[at * topk..][..topk], gates[token * topk..][..topk]);
                assert_eq!(
                    parts_of[at * experts..][..experts],
                    whole[token * experts..][..experts]
                );
            }
            sum += dropped;
        }
        assert_eq!((sum, dropped > 0), (dropped, true));
    }

    #[test]
    fn experts_come_from_the_groups_with_the_best_pairs() {
        let sigmoid = true;
        let routing = Routing { experts: 6, groups: 3, kept_groups: 1, seq: 1, sigmoid, ..ROUTING };
        // The single best expert is in the first group, the best pair in the second.
        let logits = [3.0, -9.0, 1.0, 0.9, 0.8, -1.0];
        let (choices, _, _) = routed(routing, 0..1, &logits, None);
        assert_eq!(choices, [2, 3]);
        let (choices, _, _) = routed(Routing { kept_groups: 2, ..routing }, 0..1, &logits, None);
        assert_eq!(choices, [2, 3], "the third group's pair is better than the first's");
        let (choices, _, _) = routed(Routing { kept_groups: 3, ..routing }, 0..1, &logits, None);
        assert_eq!(choices, [0, 2], "no limit");
    }

    #[test]
    fn first_choices_and_earlier_tokens_find_room() {
        let routing = Routing { experts: 3, seq: 3, capacity: Some(2), ..ROUTING };
        // Every token scores expert 0 highest; second is 1 for the first two, 2 for the last.
        let logits = [3.0, 2.0, 1.0, 3.0, 2.0, 1.0, 3.0, 1.0, 2.0];
        let (choices, _, dropped) = routed(routing, 0..3, &logits, None);
        assert_eq!(choices, [0, 1, 0, 1, DROPPED, 2]);
        assert_eq!(dropped, 1);
    }

    #[test]
    fn a_bias_changes_the_choice_and_not_the_weight() {
        let routing = Routing { experts: 3, seq: 1, topk: 1, sigmoid: true, scale: 1.0, ..ROUTING };
        let logits = [1.0, 0.5, 0.0];
        let (choices, gates, _) = routed(routing, 0..1, &logits, Some(&[0.0, 0.5, 0.0]));
        assert_eq!(choices, [1]);
        assert_within(&gates, &[1.0 / (1.0 + (-0.5f64).exp())], 1e-6);
        let (mut excess, mut counts) = ([1.0f32; 3], [0; 3]);
        bias_gradient(&[0, 0, 1 | DROPPED], 0.5, &mut excess, Write::Accumulate, &mut counts);
        assert_eq!(excess, [1.5, 1.0, 0.5]);
    }

    #[test]
    fn what_is_no_number_is_still_chosen_once() {
        let routing = Routing { seq: 1, ..ROUTING };
        let (choices, _, _) = routed(routing, 0..1, &[f32::NAN; 5], None);
        assert_eq!(choices, [0, 1]);
    }
}
