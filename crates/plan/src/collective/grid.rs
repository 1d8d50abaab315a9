//! A group of ranks as a grid of dimensions, each with its algorithm and link bandwidth.

use std::fmt;

/// The dimensions that a group spans, innermost first; consecutive ranks are neighbours there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Grid {
    /// The dimensions, padded with empty ones.
    dimensions: [GridDimension; Self::MAX_DIMENSIONS],
}

/// One dimension of a [`Grid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GridDimension {
    /// Number of ranks that differ in this dimension only.
    pub size: u32,
    /// Algorithm along this dimension.
    pub way: DimAlgorithm,
    /// Bandwidth of one rank's links in this dimension, in MB/s. Only the ratios matter.
    pub rate: u32,
}

/// Algorithm of reduce-scatter and all-gather along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DimAlgorithm {
    /// From neighbour to neighbour, for dimensions whose links connect neighbours.
    Ring,
    /// All pairs at once, for dimensions with a link for every pair.
    Direct,
    /// Recursive halving and doubling, for switches with a power of two of ranks.
    Halving,
}

impl DimAlgorithm {
    const fn letter(self) -> char {
        match self {
            Self::Ring => 'r',
            Self::Direct => 'd',
            Self::Halving => 'h',
        }
    }

    /// Number of rounds of a reduce_scatter or an all_gather of `size` ranks.
    pub const fn rounds(self, size: u32) -> u32 {
        match self {
            _ if size <= 1 => 0,
            Self::Ring => size - 1,
            Self::Direct => 1,
            Self::Halving => size.ilog2(),
        }
    }
}

impl Grid {
    /// Maximum number of dimensions with which every subset of ranks is a regular set of chunks.
    pub const MAX_DIMENSIONS: usize = 4;
    /// Maximum number of dimensions with halving; with more, its chunks have irregular distances.
    pub const MAX_WITH_HALVING: usize = 3;

    const NONE: GridDimension = GridDimension { size: 0, way: DimAlgorithm::Ring, rate: 0 };

    /// Creates a grid; `None` if there are too few or too many dimensions, or if one is empty or
    /// has zero bandwidth.
    pub fn new(dimensions: &[GridDimension]) -> Option<Self> {
        let mut grid = Self { dimensions: [Self::NONE; Self::MAX_DIMENSIONS] };
        grid.dimensions.get_mut(..dimensions.len())?.copy_from_slice(dimensions);
        let sound = |d: &GridDimension| d.size > 0 && d.rate > 0;
        (!dimensions.is_empty() && dimensions.iter().all(sound)).then_some(grid)
    }

    /// The dimensions.
    pub fn dimensions(&self) -> &[GridDimension] {
        let count = self.dimensions.iter().take_while(|d| d.size > 0).count();
        &self.dimensions[..count]
    }

    /// Number of ranks of the grid.
    pub fn ranks(&self) -> u64 {
        self.dimensions().iter().fold(1, |ranks: u64, d| ranks.saturating_mul(d.size.into()))
    }

    /// Returns true if every dimension can use its algorithm.
    pub(super) fn is_possible(&self) -> bool {
        let halves = |d: &GridDimension| d.way == DimAlgorithm::Halving && d.size > 2;
        let few = self.dimensions().len() <= Self::MAX_WITH_HALVING;
        self.dimensions().iter().all(|d| !halves(d) || (few && d.size.is_power_of_two()))
    }

    /// Parses `8hx16r` or, with rates, `8hx16r@240000x23000`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (shape, rates) = match text.split_once('@') {
            Some((shape, rates)) => (shape, Some(rates)),
            None => (text, None),
        };
        let mut rates = rates.map(|rates| rates.split('x'));
        let dimension = |text: &str| {
            let way = match text.chars().next_back()? {
                'r' => DimAlgorithm::Ring,
                'd' => DimAlgorithm::Direct,
                'h' => DimAlgorithm::Halving,
                _ => return None,
            };
            let size = text[..text.len() - 1].parse().ok()?;
            let rate = match &mut rates {
                Some(rates) => rates.next()?.parse().ok()?,
                None => 1,
            };
            Some(GridDimension { size, way, rate })
        };
        let dimensions: Option<Vec<_>> = shape.split('x').map(dimension).collect();
        let left = rates.is_some_and(|mut rates| rates.next().is_some());
        Self::new(&dimensions?).filter(|_| !left)
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dimensions = self.dimensions();
        let join = |words: Vec<String>| words.join("x");
        let shape = dimensions.iter().map(|d| format!("{}{}", d.size, d.way.letter()));
        let rates = dimensions.iter().map(|d| d.rate.to_string());
        let shape = join(shape.collect());
        match dimensions.iter().all(|d| d.rate == 1) {
            true => f.pad(&shape),
            false => f.pad(&format!("{shape}@{}", join(rates.collect()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_are_read_as_they_are_written() {
        for text in ["8r", "8hx16r", "2dx2dx2d", "4rx4rx4rx4r", "8hx16r@240000x23000"] {
            assert_eq!(Grid::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Grid::parse("8rx4h@1x1").unwrap().to_string(), "8rx4h");
    }

    #[test]
    fn what_is_no_grid_is_not_read() {
        for text in
            ["", "8", "r", "0r", "8q", "8rx", "8r@", "8r@0", "8r@1x2", "8rx2r@1", "-8r", "8é"]
        {
            assert_eq!(Grid::parse(text), None, "{text}");
        }
        assert_eq!(Grid::parse("2rx2rx2rx2rx2r"), None, "too many dimensions");
        assert!(!Grid::parse("6h").unwrap().is_possible());
        assert!(!Grid::parse("2rx4hx2rx2r").unwrap().is_possible());
        assert!(Grid::parse("2rx2hx2rx2r").unwrap().is_possible(), "halving of two is a ring");
    }
}
