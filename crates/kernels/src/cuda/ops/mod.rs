//! Operators of a program, queued on a stream of a device.
//!
//! Every function checks that its spans are inside the arena and have the lengths of their shapes:
//! the launches rely on that.

mod attention;
mod elementwise;
mod embedding;
mod experts;
mod heads;
mod linear;
mod loss;
mod norm;
mod ring_attention;
mod update;

pub use attention::{AttentionAt, AttentionGradientAt};
pub use elementwise::{Function, RotationAt};
pub use embedding::{Places, Words};
pub use experts::{DispatchAt, DispatchShape};
pub use heads::{HeadNormGradientAt, LatentAt};
pub use linear::{InputGradientAt, LinearAt};
pub use loss::{LossAt, ShardLossAt};
pub use norm::{NormAt, NormGradientAt};
pub use ring_attention::{RingStepAt, RingStepGradientAt};
pub use update::{Squares, TensorBlocks, Update, UpdateAt};

use crate::{Rows, Write};

/// Elements of a matrix.
const fn elements(shape: Rows) -> u64 {
    shape.rows as u64 * shape.width as u64
}

/// Flag of a kernel that overwrites.
fn fresh(mode: Write) -> u32 {
    u32::from(mode == Write::Overwrite)
}

/// Number as a kernel takes it. Sizes beyond 32 bits have no memory.
fn word(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
