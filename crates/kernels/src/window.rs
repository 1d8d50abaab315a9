//! A square window that moves over images: where it stands, and what it sees there.
//!
//! Images lie row by row, a pixel's channels side by side. What a window sees of one row of an image is
//! therefore one run of neighbouring elements.

use std::ops::Range;

/// A window, and the images that it moves over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Pixels along each side of an image.
    pub side: usize,
    /// Numbers in a pixel.
    pub channels: usize,
    /// Pixels along each side of the window.
    pub kernel: usize,
    /// Pixels from one place of the window to the next.
    pub stride: usize,
    /// Pixels that the window reaches beyond each edge.
    pub padding: usize,
}

impl Window {
    /// Places of the window along each side.
    pub fn side_out(&self) -> usize {
        (self.side + 2 * self.padding).checked_sub(self.kernel).map_or(0, |r| r / self.stride + 1)
    }

    /// Places of the window on one image.
    pub fn places(&self) -> usize {
        self.side_out() * self.side_out()
    }

    /// Elements of one image.
    pub fn image(&self) -> usize {
        self.side * self.side * self.channels
    }

    /// Elements that the window sees at one place, those beyond the edges included.
    pub fn seen(&self) -> usize {
        self.kernel * self.kernel * self.channels
    }

    /// Whether a place is a pixel, and the places are all pixels in their order.
    pub(crate) fn is_pointwise(&self) -> bool {
        self.kernel == 1 && self.stride == 1 && self.padding == 0
    }

    /// The pixels of the image along one side that the window covers at a place, and how many pixels of
    /// it lie before the edge.
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
