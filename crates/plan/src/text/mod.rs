//! Text form of plans: readable, comparable, and parsed back into the same plan.
//!
//! Each line is one item: a buffer, a segment, a call, a tensor of a bucket, an op. References
//! carry a letter for the kind of item: `b7` a buffer, `t2` a template, `s4` a segment, `c1` a
//! call, `g0` a group, `o3` an operand of a template.
//!
//! ```text
//! [program 1 "pipeline rank 1 (blocks.1..head)"]
//! lanes "compute" "forward-recv"
//! b0 "blocks.1.param" f32[198656] parameters @0
//! b7 "blocks.1.x" f32[2048]x2 activations @794624
//! s4 t3 layer 1 on b7 b0[0..128] b9
//! c0 "all_reduce loss" all_reduce sum halving-doubling canonical f32 g0 b12
//! body
//! 0 @forward-recv recv mb0 stage0 ch0 b7
//! 1 @compute 1F0 s4 fresh after 0
//! ```
//!
//! `b7` alone is a whole copy, `b7[0..8192]` a part. An op line starts with the op's number and its
//! lane. A computation is written `1F0`, as in schedules: layer 1, forward (the letter of
//! [`ComputePass`](crate::program::ComputePass)), microbatch 0. A line that starts with `#` is a
//! comment; blank lines and indentation are ignored.

mod attributes;
mod line;
mod parse;
mod parse_items;
mod print;
mod words;

pub(crate) use attributes::Attribute;
pub(crate) use line::Line;
pub use parse::parse;
pub use print::print;
pub(crate) use words::Word;

use thiserror::Error;

/// Error for a text that is not a plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Line number, counted from 1.
    pub line: usize,
    /// The problem, and the expected form.
    pub message: String,
}

#[cfg(test)]
mod tests;
