//! Columns of matrices beside each other, and taken apart.

use crate::element::Element;
use crate::shape::Rows;

/// Matrices of `rows` rows, each with its width, beside each other.
pub fn concat<T: Element>(rows: usize, parts: &[(&[T], usize)], y: &mut [T]) {
    let width: usize = parts.iter().map(|(_, width)| width).sum();
    for (row, y) in (0..rows).zip(y.chunks_exact_mut(width.max(1))) {
        let mut rest = y;
        for &(x, width) in parts {
            let (place, behind) = rest.split_at_mut(width);
            place.copy_from_slice(&x[row * width..(row + 1) * width]);
            rest = behind;
        }
    }
}

/// Columns of a matrix from `first` on, `width` of them.
pub fn slice<T: Element>(of: Rows, first: usize, width: usize, x: &[T], y: &mut [T]) {
    for (x, y) in x.chunks_exact(of.width).zip(y.chunks_exact_mut(width)) {
        y.copy_from_slice(&x[first..first + width]);
    }
}

/// Gradient of the matrix whose columns from `first` on were taken: zero beside that of the columns.
pub fn slice_gradient<T: Element>(of: Rows, first: usize, width: usize, dy: &[T], dx: &mut [T]) {
    for (dy, dx) in dy.chunks_exact(width).zip(dx.chunks_exact_mut(of.width)) {
        dx[..first].fill(T::narrow(0.0));
        dx[first..first + width].copy_from_slice(dy);
        dx[first + width..].fill(T::narrow(0.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_beside_each_other_and_are_taken_apart() {
        let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [5.0f32, 6.0]);
        let mut y = [0.0; 6];
        concat(2, &[(&a, 2), (&b, 1)], &mut y);
        assert_eq!(y, [1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
        let of = Rows { rows: 2, width: 3 };
        let mut x = [0.0; 4];
        slice(of, 0, 2, &y, &mut x);
        assert_eq!(x, a);
        let mut dx = [f32::NAN; 6];
        slice_gradient(of, 1, 1, &b, &mut dx);
        assert_eq!(dx, [0.0, 5.0, 0.0, 0.0, 6.0, 0.0]);
    }
}
