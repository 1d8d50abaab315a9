//! How much of a device's rate a matrix product reaches, from its shape.

use crate::cluster::Device;
use paceline_plan::DType;

/// rows × depth times depth × columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Product {
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) depth: u64,
}

impl Product {
    /// Operations of one product.
    pub(super) fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.columns as f64 * self.depth as f64
    }

    /// The share of the sustained rate that `batch` such products in one kernel reach.
    ///
    /// Devices with matrix units compute the result in tiles of 128 × 128, each by one
    /// multiprocessor (NVIDIA, "Matrix Multiplication Background User's Guide"; a TPU's array has
    /// the same width). Four things are lost, in the order of the factors:
    ///
    /// 1. A product comes as it comes; see [`ORDINARY`].
    /// 2. Tiles that reach over the edge do work for nothing.
    /// 3. A tile starts by filling its pipeline and ends by writing its result, which together cost
    ///    about as much as [`RAMP`] more steps in depth.
    /// 4. The last wave of tiles is half full on average, so that half a wave is lost.
    ///
    /// A type without matrix units runs on a CPU's cores, or on a GPU's vector units in small
    /// tiles, and loses none of this worth counting.
    pub(super) fn efficiency(&self, device: &Device, dtype: DType, batch: f64) -> f64 {
        let tiled = device.rate(dtype) > device.rate(DType::F32);
        if !tiled || self.rows == 0 || self.columns == 0 || self.depth == 0 {
            return 1.0;
        }
        let across = |size: u64| (size as f64 / TILE).ceil();
        let tiles = across(self.rows) * across(self.columns);
        let filled = self.rows as f64 * self.columns as f64 / (tiles * TILE * TILE);
        let depth = self.depth as f64;
        let waves = tiles * batch / WAVE;
        ORDINARY * filled * depth / (depth + RAMP) * waves / (waves + 0.5)
    }
}

/// What ordinary shapes reach of the rate that a device's description states, which is that of the
/// best of many shapes, measured alone. In a training step operands are transposed, caches hold
/// other data and the device is at its power limit. An estimate from the published runs as a whole.
const ORDINARY: f64 = 0.93;

/// Width and height of the tiles that libraries prefer for large products.
const TILE: f64 = 128.0;

/// The depth that a tile's first loads and last stores cost: some 2 µs at the 1.5 to 3 TFLOP/s of a
/// multiprocessor.
const RAMP: f64 = 128.0;

/// Tiles that run at once: data-centre GPUs have from 80 (V100) to 148 (B200) multiprocessors.
const WAVE: f64 = 112.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;
    use proptest::prelude::*;

    fn square(size: u64) -> Product {
        Product { rows: size, columns: size, depth: size }
    }

    fn tflops(product: Product) -> f64 {
        let device = preset::get("dgx-a100").unwrap().device;
        product.efficiency(&device, DType::F16, 1.0) * device.sustained(DType::F16).0 / 1e12
    }

    /// Square f16 products on an A100: about 100 of 312 TFLOP/s at 1024, 230 at 4096, 240 at 8192.
    #[test]
    fn square_products_saturate() {
        assert!((80.0..150.0).contains(&tflops(square(1024))), "{}", tflops(square(1024)));
        assert!((215.0..245.0).contains(&tflops(square(4096))), "{}", tflops(square(4096)));
        assert!((230.0..255.0).contains(&tflops(square(8192))), "{}", tflops(square(8192)));
    }

    #[test]
    fn a_column_too_many_costs_a_row_of_tiles() {
        let even = Product { rows: 4096, columns: 512, depth: 4096 };
        let odd = Product { columns: 513, ..even };
        let ratio = tflops(odd) / tflops(even);
        assert!((0.8..0.87).contains(&ratio), "five columns of tiles in place of four: {ratio}");
    }

    #[test]
    fn what_has_no_matrix_unit_has_no_tiles() {
        let core = preset::get("laptop").unwrap().device;
        assert_eq!(square(3).efficiency(&core, DType::Bf16, 1.0), 1.0);
        let gpu = preset::get("dgx-a100").unwrap().device;
        assert_eq!(square(3).efficiency(&gpu, DType::F32, 1.0), 1.0);
        assert!(square(3).efficiency(&gpu, DType::Fp8, 1.0) < 1e-3, "computed as bf16");
    }

    proptest! {
        #[test]
        fn efficiency_is_a_share(rows: u64, columns: u64, depth: u64, batch in 1.0..1e6f64) {
            let device = preset::get("dgx-h100").unwrap().device;
            let share = Product { rows, columns, depth }.efficiency(&device, DType::Bf16, batch);
            prop_assert!(share > 0.0 && share <= 1.0, "{share}");
        }

        /// A larger product of the same form never takes less time.
        #[test]
        fn deeper_products_take_longer(size in 1u64..5000, more in 1u64..5000) {
            let time = |depth: u64| {
                let product = Product { rows: size, columns: size, depth };
                product.flops() / tflops(product)
            };
            prop_assert!(time(size) < time(size + more));
        }
    }
}
