//! Mixture of experts: routing of tokens ([`route`]), permutation into expert order and back
//! ([`dispatch`]), and the experts' GEMMs ([`product`]).
//!
//! Tokens in expert order are stored in *regions* of a fixed number of rows, one for each rank that
//! holds experts. A region is filled from its start, expert after expert; counts give the number of
//! rows of each, and the rows after them are zero.

pub mod bias;
pub mod dispatch;
pub mod product;
pub mod route;
