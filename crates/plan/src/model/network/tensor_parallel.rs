//! Division of a layer's matrices by tensor parallelism, found from the operators that read their
//! results.
//!
//! A matrix is divided by outputs if only element-wise functions, attention and further matrices of
//! the layer read them, and those are then divided by inputs (Shoeybi et al., arXiv 1909.08053).
//! Logits are divided by classes. Every rank computes the rest alike.

use super::{Network, Op, Operator, Shape};

/// Part that a matrix plays in its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Divided by outputs.
    Up,
    /// Divided by outputs, of which attention reads heads.
    Heads,
    /// Divided by inputs.
    Down,
    /// Divided by inputs, which are attention's.
    FromHeads,
    /// Logits, divided by classes.
    Logits,
    /// Computed by every rank.
    Whole,
}

/// Role of every operator's matrix in a layer whose results `leaves` are read by later ones.
/// Operators without a matrix have [`Role::Whole`], unless they work on a divided tensor, in whose
/// width they are divided.
pub(crate) fn roles(operators: &[Operator], leaves: &[(String, Shape)]) -> Vec<Role> {
    let mut roles = vec![Role::Whole; operators.len()];
    for at in 0..operators.len() {
        let Operator { op, reads, .. } = &operators[at];
        if !matches!(op, Op::Linear { .. }) {
            continue;
        }
        roles[at] = match divided(operators, &roles, at, &reads[0]) {
            Some(Role::Heads) => Role::FromHeads,
            Some(_) => Role::Down,
            None => by_outputs(operators, leaves, at).unwrap_or(Role::Whole),
        };
    }
    roles
}

/// Role of the matrix that divided a tensor, if one did.
fn divided(operators: &[Operator], roles: &[Role], before: usize, name: &str) -> Option<Role> {
    let at = operators[..before].iter().rposition(|operator| operator.makes == name)?;
    match operators[at].op {
        Op::Linear { .. } => matches!(roles[at], Role::Up | Role::Heads).then_some(roles[at]),
        Op::Activation { .. } => divided(operators, roles, at, &operators[at].reads[0]),
        Op::Attention { .. } => divided(operators, roles, at, &operators[at].reads[0]),
        _ => None,
    }
}

/// Role of a matrix that can be divided by outputs.
fn by_outputs(operators: &[Operator], leaves: &[(String, Shape)], made: usize) -> Option<Role> {
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
            Op::Linear { .. } => Role::Up,
            Op::CrossEntropy => Role::Logits,
            // Attention's own result is read by matrices only: shapes were checked.
            Op::Attention { .. } => Role::Heads,
            Op::Activation { .. } => match by_outputs(operators, leaves, at)? {
                Role::Up => Role::Up,
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
                    (Op::Linear { width, .. }, Role::Up) => ("width", width),
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
