//! Row-wise operators of a program: norms, the loss, and sums of squares.

#![expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]

use super::device::{CudaError, Device, Stream};
use super::ops::{Arg, elements, fresh};
use crate::arena::Span;
use crate::{Rows, Write};

impl Device {
    /// [`crate::norm::layer_norm_forward`], or with one weight [`crate::norm::rms_norm_forward`].
    pub fn norm(
        &self,
        stream: Stream,
        shape: Rows,
        epsilon: f32,
        x: Span,
        gamma: Span,
        beta: Option<Span>,
        y: Span,
        stats: Span,
    ) -> Result<(), CudaError> {
        let (n, rows, width) = (elements(shape), shape.rows as u64, shape.width as u64);
        let (x, y, gamma) =
            (self.arg("x", x, n)?, self.arg("y", y, n)?, self.arg("gamma", gamma, width)?);
        let (width_of, epsilon) = (Arg::Count(width), Arg::Real(epsilon));
        match beta {
            Some(beta) => {
                let (beta, stats) =
                    (self.arg("beta", beta, width)?, self.arg("stats", stats, 2 * rows)?);
                self.launch(
                    stream,
                    "layer_norm_forward",
                    rows,
                    &[x, gamma, beta, y, stats, width_of, epsilon],
                )
            }
            None => {
                let stats = self.arg("stats", stats, rows)?;
                self.launch(
                    stream,
                    "rms_norm_forward",
                    rows,
                    &[x, gamma, y, stats, width_of, epsilon],
                )
            }
        }
    }

    /// Input gradient of a norm; `layer` selects layer normalisation.
    pub fn norm_input(
        &self,
        stream: Stream,
        shape: Rows,
        layer: bool,
        dy: Span,
        x: Span,
        gamma: Span,
        stats: Span,
        dx: Span,
    ) -> Result<(), CudaError> {
        let (n, rows, width) = (elements(shape), shape.rows as u64, shape.width as u64);
        let per_row = if layer { 2 } else { 1 };
        let args = [
            self.arg("dy", dy, n)?,
            self.arg("x", x, n)?,
            self.arg("gamma", gamma, width)?,
            self.arg("stats", stats, per_row * rows)?,
            self.arg("dx", dx, n)?,
            Arg::Count(width),
        ];
        self.launch(
            stream,
            if layer { "layer_norm_gradient" } else { "rms_norm_gradient" },
            rows,
            &args,
        )
    }

    /// Weight gradients of a norm: two for layer normalisation, else one.
    pub fn norm_weight(
        &self,
        stream: Stream,
        shape: Rows,
        dy: Span,
        x: Span,
        stats: Span,
        dgamma: Span,
        dbeta: Option<Span>,
        mode: Write,
    ) -> Result<(), CudaError> {
        let (n, rows, width) = (elements(shape), shape.rows as u64, shape.width as u64);
        let (dy, x, dgamma) =
            (self.arg("dy", dy, n)?, self.arg("x", x, n)?, self.arg("dgamma", dgamma, width)?);
        let sizes = [Arg::Count(rows), Arg::Count(width)];
        match dbeta {
            Some(dbeta) => {
                let (stats, dbeta) =
                    (self.arg("stats", stats, 2 * rows)?, self.arg("dbeta", dbeta, width)?);
                let args = [dy, x, stats, dgamma, dbeta, sizes[0], sizes[1], fresh(mode)];
                self.over(stream, "layer_norm_weights", width, &args)
            }
            None => {
                let stats = self.arg("stats", stats, rows)?;
                let args = [dy, x, stats, dgamma, sizes[0], sizes[1], fresh(mode)];
                self.over(stream, "rms_norm_weights", width, &args)
            }
        }
    }

    /// Same as [`crate::loss::row_max`], for an unsharded vocabulary.
    pub fn row_max(
        &self,
        stream: Stream,
        shape: Rows,
        logits: Span,
        max: Span,
    ) -> Result<(), CudaError> {
        let rows = shape.rows as u64;
        let args = [
            self.arg("logits", logits, elements(shape))?,
            self.arg("max", max, rows)?,
            Arg::Count(shape.width as u64),
        ];
        self.launch(stream, "row_max", rows, &args)
    }

    /// Same as [`crate::loss::softmax_stats`], for an unsharded vocabulary.
    pub fn softmax_stats(
        &self,
        stream: Stream,
        shape: Rows,
        logits: Span,
        max: Span,
        targets: Span,
        stats: Span,
    ) -> Result<(), CudaError> {
        let rows = shape.rows as u64;
        let args = [
            self.arg("logits", logits, elements(shape))?,
            self.arg("max", max, rows)?,
            self.arg("targets", targets, rows)?,
            self.arg("stats", stats, 2 * rows)?,
            Arg::Count(shape.width as u64),
        ];
        self.launch(stream, "softmax_stats", rows, &args)
    }

    /// Sum of the rows' losses: [`crate::loss::cross_entropy`] and [`crate::loss::sum`] in one.
    pub fn cross_entropy(
        &self,
        stream: Stream,
        rows: usize,
        stats: Span,
        total: Span,
        mode: Write,
    ) -> Result<(), CudaError> {
        let args = [
            self.arg("stats", stats, 2 * rows as u64)?,
            self.arg("total", total, 1)?,
            Arg::Count(rows as u64),
            fresh(mode),
        ];
        self.launch(stream, "cross_entropy", 1, &args)
    }

    /// Same as [`crate::loss::input_gradient`], for an unsharded vocabulary.
    pub fn cross_entropy_input(
        &self,
        stream: Stream,
        shape: Rows,
        scale: f32,
        stats: Span,
        logits: Span,
        max: Span,
        targets: Span,
        dlogits: Span,
    ) -> Result<(), CudaError> {
        let (n, rows) = (elements(shape), shape.rows as u64);
        let args = [
            self.arg("stats", stats, 2 * rows)?,
            self.arg("logits", logits, n)?,
            self.arg("max", max, rows)?,
            self.arg("targets", targets, rows)?,
            self.arg("dlogits", dlogits, n)?,
            Arg::Count(rows),
            Arg::Count(shape.width as u64),
            Arg::Real(scale),
        ];
        self.over(stream, "cross_entropy_gradient", n, &args)
    }

    /// Same as [`crate::reduce::block_squares`].
    pub fn block_squares(
        &self,
        stream: Stream,
        x: Span,
        block: u64,
        sums: Span,
    ) -> Result<(), CudaError> {
        let blocks = sums.len / 4;
        let args =
            [self.arg("x", x, blocks * block)?, self.arg("sums", sums, blocks)?, Arg::Count(block)];
        self.launch(stream, "block_squares", blocks, &args)
    }

    /// Sum of all elements, or its square root, written to one element.
    pub fn sum(&self, stream: Stream, x: Span, y: Span, root: bool) -> Result<(), CudaError> {
        let n = x.len / 4;
        let args = [self.arg("x", x, n)?, self.arg("y", y, 1)?, Arg::Count(n)];
        self.launch(stream, if root { "root_of_sum" } else { "sum_into" }, 1, &args)
    }
}
