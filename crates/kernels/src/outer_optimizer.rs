//! Outer optimizer of local SGD and DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1).

use crate::instruction_set::vectorised;
use crate::shape::expect_len;

/// Constants of an outer step: by `rate` along the mean pseudo-gradient, with momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OuterStep {
    /// One over the number of replicas.
    pub share: f32,
    /// Learning rate of the outer step.
    pub rate: f32,
    /// Factor of the old velocity.
    pub momentum: f32,
}

/// `moved = share · (anchor − weights)`: the pseudo-gradient of the outer step, with the replica's
/// factor in the mean.
pub fn pseudo_gradient(weights: &[f32], anchor: &[f32], share: f32, moved: &mut [f32]) {
    expect_len("weights", weights.len(), &[moved.len()]);
    expect_len("anchor", anchor.len(), &[moved.len()]);
    vectorised(
        #[inline(always)]
        || {
            for (moved, (weight, anchor)) in moved.iter_mut().zip(weights.iter().zip(anchor)) {
                *moved = share * (anchor - weight);
            }
        },
    );
}

/// Moves the anchor against the mean pseudo-gradient and sets the weights to it. With a velocity
/// this is Nesterov's method: v = momentum·v + g, and the step is rate·(g + momentum·v).
pub fn step(
    rule: OuterStep,
    moved: &[f32],
    anchor: &mut [f32],
    velocity: Option<&mut [f32]>,
    weights: &mut [f32],
) {
    expect_len("anchor", anchor.len(), &[moved.len()]);
    expect_len("weights", weights.len(), &[moved.len()]);
    let OuterStep { share, rate, momentum } = rule;
    vectorised(
        #[inline(always)]
        || {
            let each = anchor.iter_mut().zip(weights.iter_mut()).zip(moved);
            match velocity {
                None => {
                    for ((anchor, weight), moved) in each {
                        *anchor -= rate * share * moved;
                        *weight = *anchor;
                    }
                }
                Some(velocity) => {
                    for (((anchor, weight), moved), velocity) in each.zip(velocity) {
                        let gradient = share * moved;
                        *velocity = momentum * *velocity + gradient;
                        *anchor -= rate * (gradient + momentum * *velocity);
                        *weight = *anchor;
                    }
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_momentum_all_go_to_the_mean() {
        let (replicas, mut anchor) = ([[1.0f32, 4.0], [3.0, 0.0]], [0.5f32, 0.5]);
        let mut sum = [0.0f32; 2];
        for weights in &replicas {
            let mut moved = [0.0; 2];
            pseudo_gradient(weights, &anchor, 1.0, &mut moved);
            sum.iter_mut().zip(moved).for_each(|(sum, moved)| *sum += moved);
        }
        let mut weights = [9.0; 2];
        let rule = OuterStep { share: 0.5, rate: 1.0, momentum: 0.0 };
        step(rule, &sum, &mut anchor, None, &mut weights);
        assert_eq!((weights, anchor), ([2.0, 2.0], [2.0, 2.0]));
    }

    #[test]
    fn velocity_carries_on_where_replicas_stand_still() {
        let rule = OuterStep { share: 1.0, rate: 0.5, momentum: 0.5 };
        let (mut anchor, mut velocity, mut weights) = ([0.0f32], [0.0f32], [0.0f32]);
        step(rule, &[1.0], &mut anchor, Some(&mut velocity), &mut weights);
        assert_eq!((anchor, velocity), ([-0.75], [1.0]));
        step(rule, &[0.0], &mut anchor, Some(&mut velocity), &mut weights);
        assert_eq!((weights, velocity), ([-0.875], [0.5]));
    }
}
