//! A square sliding window over images: its positions and the elements it covers.
//!
//! Images are stored row by row with channels innermost. The part of an image row that a window
//! covers is therefore contiguous.

use std::ops::Range;

/// A window and the size of the images that it slides over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Pixels along each side of an image.
    pub side: usize,
    /// Number of channels of a pixel.
    pub channels: usize,
    /// Pixels along each side of the window.
    pub kernel: usize,
    /// Pixels between consecutive window positions.
    pub stride: usize,
    /// Pixels of padding beyond each edge.
    pub padding: usize,
}

impl Window {
    /// Number of window positions along each side.
    pub fn side_out(&self) -> usize {
        (self.side + 2 * self.padding).checked_sub(self.kernel).map_or(0, |r| r / self.stride + 1)
    }

    /// Number of window positions on one image.
    pub fn places(&self) -> usize {
        self.side_out() * self.side_out()
    }

    /// Number of elements of one image.
    pub fn image(&self) -> usize {
        self.side * self.side * self.channels
    }

    /// Number of elements of the window at one position, padding included.
    pub fn seen(&self) -> usize {
        self.kernel * self.kernel * self.channels
    }

    /// Returns true if the window is a single pixel, and its positions are all pixels in order.
    pub(crate) fn is_pointwise(&self) -> bool {
        self.kernel == 1 && self.stride == 1 && self.padding == 0
    }

    /// The image pixels along one side that the window covers at position `place`, and the number
    /// of padding pixels before them.
    #[inline(always)]
    pub(crate) fn covered(&self, place: usize) -> (Range<usize>, usize) {
        let start = place * self.stride;
        let first = start.saturating_sub(self.padding);
        let last = (start + self.kernel).saturating_sub(self.padding).min(self.side);
        (first..last.max(first), self.padding.saturating_sub(start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_covers_what_lies_in_the_image() {
        let window = Window { side: 5, channels: 1, kernel: 3, stride: 2, padding: 1 };
        assert_eq!((window.side_out(), window.places()), (3, 9));
        assert_eq!(window.covered(0), (0..2, 1));
        assert_eq!(window.covered(1), (1..4, 0));
        assert_eq!(window.covered(2), (3..5, 0));
        let larger = Window { side: 1, kernel: 4, padding: 1, ..window };
        assert_eq!(larger.side_out(), 0);
    }
}
