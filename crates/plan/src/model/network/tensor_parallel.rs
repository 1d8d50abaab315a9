//! Division of a layer's matrices by tensor parallelism, found from the operators that read their
//! results.
//!
//! A matrix is divided by outputs if only element-wise functions, attention and further matrices of
//! the layer read them, and those are then divided by inputs (Shoeybi et al., arXiv 1909.08053).
//! Logits are divided by classes. Every rank computes the rest alike.

use super::{Network, Op, Operator, Shape};
use crate::graph::LinearRole;

/// Role of every operator's matrix in a layer whose results `leaves` are read by later ones.
/// A matrix that every rank computes, and an operator without one, has [`LinearRole::Join`].
pub(crate) fn roles(operators: &[Operator], leaves: &[(String, Shape)]) -> Vec<LinearRole> {
    let mut roles = vec![LinearRole::Join; operators.len()];
    for at in 0..operators.len() {
        let Operator { op, reads, .. } = &operators[at];
        if !matches!(op, Op::Linear { .. }) {
            continue;
        }
        roles[at] = match divided(operators, &roles, at, &reads[0]) {
            Some(LinearRole::Qkv) => LinearRole::AttentionOut,
            Some(_) => LinearRole::Down,
            None => by_outputs(operators, leaves, at).unwrap_or(LinearRole::Join),
        };
    }
    roles
}

/// Role of the matrix that divided a tensor, if one did.
fn divided(
    operators: &[Operator],
    roles: &[LinearRole],
    before: usize,
    name: &str,
) -> Option<LinearRole> {
    let at = operators[..before].iter().rposition(|operator| operator.makes == name)?;
    match operators[at].op {
        Op::Linear { .. } => {
            matches!(roles[at], LinearRole::Up | LinearRole::Qkv).then_some(roles[at])
        }
        Op::Activation { .. } => divided(operators, roles, at, &operators[at].reads[0]),
        Op::Attention { .. } => divided(operators, roles, at, &operators[at].reads[0]),
        _ => None,
    }
}

/// Role of a matrix that can be divided by outputs.
fn by_outputs(
    operators: &[Operator],
    leaves: &[(String, Shape)],
    made: usize,
) -> Option<LinearRole> {
    let name = &operators[made].makes;
    if leaves.iter().any(|(left, _)| left == name) {
        return None;
    }
    let mut found = None;
    for (at, reader) in operators.iter().enumerate().skip(made + 1) {
        if !reader.reads.contains(name) {
            continue;
        }
        let role = match reader.op {
            Op::Linear { .. } => LinearRole::Up,
            Op::CrossEntropy => LinearRole::Head,
            // Attention's own result is read by matrices only: shapes were checked.
            Op::Attention { .. } => LinearRole::Qkv,
            Op::Activation { .. } => match by_outputs(operators, leaves, at)? {
                LinearRole::Up => LinearRole::Up,
                _ => return None,
            },
            _ => return None,
        };
        if found.is_some_and(|found| found != role) {
            return None;
        }
        found = Some(role);
    }
    found
}

impl Network {
    /// A size that `tp` does not divide although tensor parallelism must, with its name.
    pub fn undivided(&self, tp: u64) -> Option<(String, u64)> {
        for layer in self.plain() {
            let roles = roles(layer.operators, &layer.leaves);
            for (operator, role) in layer.operators.iter().zip(roles) {
                let (what, size) = match (operator.op, role) {
                    (Op::Linear { width, .. }, LinearRole::Up) => ("width", width),
                    (Op::Attention { kv_heads, .. }, _) => ("number of key heads", kv_heads),
                    _ => continue,
                };
                if !size.is_multiple_of(tp) {
                    let (made, name) = (&operator.makes, &layer.name);
                    return Some((format!("{what} of '{made}' in layer '{name}',"), size));
                }
            }
        }
        None
    }
}
