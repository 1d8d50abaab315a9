//! Mixtures of experts: which experts a token goes to ([`route`]), bringing tokens into the order of
//! their experts and back ([`dispatch`]), and the experts' products ([`product`]).
//!
//! Tokens in expert order stand in *regions* of a fixed number of rows, one for each holder of experts.
//! A region is filled from its start, expert after expert; counts say how many rows each has, and what
//! is behind them is zero.

pub mod dispatch;
pub mod product;
pub mod route;
