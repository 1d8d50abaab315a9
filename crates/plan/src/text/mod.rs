//! Plans as text that people read, compare and keep, and that reads back as the same plan.
//!
//! One line is one thing: a buffer, a segment, a call, a tensor of a bucket, an op. Names that refer
//! to something carry a letter for what they refer to: `b7` a buffer, `t2` a template, `s4` a
//! segment, `c1` a call, `g0` a group, `o3` an operand of a template.
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
//! `b7` alone is the whole of a copy, `b7[0..8192]` a part. An op line starts with the op's number
//! and its lane; a computation is written `1F0`, as schedules are: layer 1, forward (the letter of
//! [`SegmentPass`](crate::program::SegmentPass)), microbatch 0. A line that starts with `#` is a
//! comment; blank lines and indentation mean nothing.

mod line;
mod parse;
mod print;
mod words;

pub use parse::parse;
pub use print::print;

use thiserror::Error;

/// Why a text is no plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong there, and what would be right.
    pub message: String,
}

#[cfg(test)]
mod tests;
