//! A row of the table of operators, and the words in which rows are written.

use super::cost::{CostClass, ElementWise, Permute, Product, RowWise};
use super::differentiate::{Gradient, Of};
use super::sharding::Sharding;

/// Properties of an operator.
pub(crate) struct Row {
    pub(crate) class: CostClass,
    /// Approximate operations per element besides GEMMs.
    pub(crate) intensity: f64,
    pub(crate) gradient: Gradient,
    pub(crate) sharding: Sharding,
    /// Pairs (input, output) of which the output overwrites the input: forward, input gradient.
    pub(super) in_place: [&'static [(usize, usize)]; 2],
}

/// A row of an operator without gradient that every tensor-parallel rank computes alike.
pub(super) const fn row(class: CostClass) -> Row {
    let (gradient, sharding) = (Gradient::NONE, Sharding::Replicated);
    Row { class, intensity: 0.0, gradient, sharding, in_place: [&[], &[]] }
}

pub(super) const fn product(of: Product) -> Row {
    row(CostClass::Product(of))
}

pub(super) const fn row_wise(of: RowWise) -> Row {
    row(CostClass::RowWise(of))
}

pub(super) const fn element_wise(of: ElementWise) -> Row {
    row(CostClass::ElementWise(of))
}

pub(super) const fn lookup(rows: u64) -> Row {
    row(CostClass::Lookup { rows })
}

pub(super) const fn permute(of: Permute) -> Row {
    row(CostClass::Permute(of))
}

pub(super) const fn reduction() -> Row {
    row(CostClass::Reduction)
}

/// The gradient of the first input, from these operands.
pub(super) const fn input(reads: &'static [Of]) -> Gradient {
    Gradient::NONE.input(&[0], reads)
}

/// The gradient of the parameters, from these operands.
pub(super) const fn weight(reads: &'static [Of]) -> Gradient {
    Gradient::NONE.weight(reads)
}

impl Row {
    pub(super) const fn intensity(self, intensity: f64) -> Self {
        Self { intensity, ..self }
    }

    pub(super) const fn gradient(self, gradient: Gradient) -> Self {
        Self { gradient, ..self }
    }

    pub(super) const fn sharding(self, sharding: Sharding) -> Self {
        Self { sharding, ..self }
    }

    pub(super) const fn in_place(
        self,
        forward: &'static [(usize, usize)],
        input: &'static [(usize, usize)],
    ) -> Self {
        Self { in_place: [forward, input], ..self }
    }
}

/// Most tensors that one operator puts beside each other.
pub(crate) const MOST_PARTS: usize = 16;

/// Indices of the first `parts` inputs.
pub(super) fn first(parts: u64) -> &'static [usize] {
    const INPUTS: [usize; MOST_PARTS] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    &INPUTS[..(parts as usize).min(MOST_PARTS)]
}
