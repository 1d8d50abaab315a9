//! Fraction of a device's peak rate that a GEMM reaches, from its shape.

use crate::cluster::Device;
use paceline_plan::DType;

/// A GEMM: rows × depth times depth × columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Product {
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) depth: u64,
}

impl Product {
    /// Floating-point operations of one GEMM.
    pub(super) fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.columns as f64 * self.depth as f64
    }

    /// Returns the fraction of the peak rate that `batch` such GEMMs in one kernel reach.
    ///
    /// A dtype without matrix units runs on a CPU's cores, or on a GPU's vector units in small
    /// tiles, and loses nothing significant to its shape. The same holds for a device whose
    /// description does not name its matrix units.
    pub(super) fn efficiency(&self, device: &Device, dtype: DType, batch: f64) -> f64 {
        let matrix = device.rate(dtype) > device.rate(DType::F32);
        if !matrix || self.rows == 0 || self.columns == 0 || self.depth == 0 {
            return device.sustained_efficiency;
        }
        let shape = self.on_units(device, dtype, batch);
        let narrow = if dtype.is_of_products() { NARROW } else { 1.0 };
        let sustained = device.sustained_efficiency * narrow;
        shape.ramp * (device.max_efficiency * shape.share).min(sustained)
    }

    /// Tiles of one GEMM alone; a device whose description names no matrix units has one.
    pub(super) fn tiling(&self, device: &Device, dtype: DType) -> Tiling {
        let matrix = device.rate(dtype) > device.rate(DType::F32);
        let whole = Tiling { tile: [self.side(self.rows), self.side(self.columns)], ..Tiling::ONE };
        if matrix { self.on_units(device, dtype, 1.0).tiling.unwrap_or(whole) } else { whole }
    }

    fn side(&self, size: u64) -> u32 {
        u32::try_from(size).unwrap_or(u32::MAX)
    }

    fn on_units(&self, device: &Device, dtype: DType, batch: f64) -> TileEfficiency {
        // Four-bit units of one device are faster, relative to those for two bytes, than another's.
        let faster = match dtype {
            DType::Fp8 => 2.0,
            DType::Nvfp4 | DType::Mxfp4 => device.rate(dtype).0 / device.rate(DType::Bf16).0,
            DType::F32 | DType::Bf16 | DType::F16 | DType::U32 | DType::U8 => 1.0,
        };
        match (device.systolic_width, device.multiprocessors) {
            (Some(width), _) => self.systolic(width, device.systolic_arrays, batch),
            (None, Some(count)) => self.tiled(f64::from(count), batch, RAMP * faster),
            (None, None) => TileEfficiency { share: 1.0, ramp: 1.0, tiling: None },
        }
    }

    /// Efficiency on tiles of the result, each computed by one multiprocessor (NVIDIA, "Matrix
    /// Multiplication Background User's Guide"). Losses:
    ///
    /// 1. Parts of tiles beyond the edge of the result.
    /// 2. Idle multiprocessors in the last wave of tiles.
    /// 3. Tiles smaller than the best size, which read more per operation.
    /// 4. The ramp: a tile starts by filling its pipeline and ends by writing its result.
    ///
    /// A library has kernels for several tile sizes and can split the depth into parts that are
    /// summed afterwards (split-K). It picks the best combination, and so does this function.
    fn tiled(&self, multiprocessors: f64, batch: f64, ramp: f64) -> TileEfficiency {
        let (rows, columns, depth) = (self.rows as f64, self.columns as f64, self.depth as f64);
        let mut best = TileEfficiency { share: 0.0, ramp: 0.0, tiling: None };
        for (height, width, quality) in TILES {
            let tiles = (rows / height).ceil() * (columns / width).ceil();
            let filled = rows * columns / (tiles * height * width);
            for parts in [1.0, 2.0, 4.0, 8.0] {
                let part = depth / parts;
                if parts > 1.0 && part < LEAST_PART {
                    break;
                }
                let tiles = tiles * batch * parts;
                let busy = tiles / ((tiles / multiprocessors).ceil() * multiprocessors);
                // Summing the parts reads and writes the tile once more per part.
                let ramp = part / (part + ramp * if parts > 1.0 { 2.0 } else { 1.0 });
                let share = filled * busy * quality;
                if share * ramp > best.share * best.ramp {
                    let tiling = Tiling {
                        tile: [height as u32, width as u32],
                        parts: parts as u32,
                        tiles: tiles as u64,
                        waves: (tiles / multiprocessors).ceil() as u64,
                    };
                    best = TileEfficiency { share, ramp, tiling: Some(tiling) };
                }
            }
        }
        best
    }

    /// Efficiency of a systolic array: one operand is stationary in arrays of `width` × `width`
    /// while the other streams through (Jouppi et al., "In-Datacenter Performance Analysis of a
    /// Tensor Processing Unit", ISCA 2017). Depth and columns are padded to whole arrays. Loading
    /// the next array overlaps with streaming the rows, except for filling and draining.
    ///
    /// Arrays work on different tiles of the weights. If there are too few, several share a tile
    /// and each streams a part of the rows; the best number of parts is taken.
    fn systolic(&self, width: u32, arrays: u32, batch: f64) -> TileEfficiency {
        let (side, units) = (f64::from(width), f64::from(arrays.max(1)));
        let across = |size: u64| (size as f64 / side).ceil();
        let filled = |size: u64| size as f64 / (across(size) * side);
        let (rows, weights) = (self.rows as f64, across(self.depth) * across(self.columns) * batch);
        let mut best = TileEfficiency { share: 0.0, ramp: 1.0, tiling: None };
        let mut parts = 1.0;
        while parts <= units && parts <= rows {
            let (tiles, each) = (weights * parts, (rows / parts).ceil());
            let waves = (tiles / units).ceil();
            let busy = tiles / (waves * units);
            let streamed = rows / parts / each * each / (each + side);
            let share = filled(self.depth) * filled(self.columns) * busy * streamed;
            if share > best.share {
                let (tile, parts) = ([width, width], parts as u32);
                let tiling = Tiling { tile, parts, tiles: tiles as u64, waves: waves as u64 };
                best = TileEfficiency { share, ramp: 1.0, tiling: Some(tiling) };
            }
            parts *= 2.0;
        }
        best
    }
}

/// Tiles in which a GEMM is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    /// Height and width.
    pub(super) tile: [u32; 2],
    /// Parts of the depth (multiprocessors) or of the rows (systolic arrays).
    pub(super) parts: u32,
    /// Number of tiles, all parts together.
    pub(super) tiles: u64,
    /// Tiles over the units that compute them, rounded up.
    pub(super) waves: u64,
}

impl Tiling {
    const ONE: Self = Self { tile: [1, 1], parts: 1, tiles: 1, waves: 1 };
}

/// Fraction of the best rate that tiling reaches, and fraction left by the ramps.
///
/// The two are separate because a GEMM that leaves multiprocessors idle draws less power. Below the
/// power limit it runs at higher clocks, so only the best momentary rate bounds it. Ramps cost time
/// at any clock.
struct TileEfficiency {
    share: f64,
    ramp: f64,
    tiling: Option<Tiling>,
}

/// Returns the fraction of the rate left for GEMMs whose rows are not aligned to 16 bytes, by their
/// alignment in bytes. Measured by us on an H200: 229 and 129 of 675 TFLOP/s in bf16 with widths of
/// 4100 and 4097.
pub(super) fn alignment(widths: [u64; 2], dtype: DType) -> f64 {
    let matrix = dtype.bits() < 32;
    let at = |width: u64| (width * dtype.bits()).trailing_zeros().saturating_sub(3);
    match widths.into_iter().filter(|&width| width > 0).map(at).min() {
        Some(0 | 1) if matrix => 0.19,
        Some(2) if matrix => 0.25,
        Some(3) if matrix => 0.34,
        Some(_) | None => 1.0,
    }
}

/// Tile height, tile width, and rate relative to the largest tile.
const TILES: [(f64, f64, f64); 7] = [
    (256.0, 128.0, 1.0),
    (128.0, 256.0, 1.0),
    (192.0, 192.0, 1.0),
    (128.0, 128.0, 0.94),
    (64.0, 128.0, 0.82),
    (128.0, 64.0, 0.82),
    (64.0, 64.0, 0.65),
];

/// Minimum depth of a split-K part.
const LEAST_PART: f64 = 1024.0;

/// Depth equivalent of a tile's first loads and last stores in two-byte dtypes. Narrower dtypes run
/// through depth faster, fp8 twice, and the value grows as much. Measured by us on an H200: GEMMs of depth
/// 1024 and 768 reach 0.87 and 0.83 of the rate of deep ones, and 0.81 and 0.75 in fp8.
const RAMP: f64 = 144.0;

/// Relative efficiency of fp8 at the power limit: 1,250 of 1,979 TFLOP/s, against 675 of 989 in
/// bf16. Measured by us on an H200 over forward and gradient GEMMs. Four-bit types are taken alike:
/// on GB200, cuBLAS reaches up to 2.3 times the rate of fp8 with them, at twice the peak (NVIDIA,
/// "Boosting Matrix Multiplication Speed and Flexibility with NVIDIA cuBLAS 12.9").
const NARROW: f64 = 0.935;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;
    use proptest::prelude::*;

    fn square(size: u64) -> Product {
        Product { rows: size, columns: size, depth: size }
    }

    fn tflops(preset: &str, product: Product, dtype: DType) -> f64 {
        let device = preset::get(preset).unwrap().device;
        product.efficiency(&device, dtype, 1.0) * device.rate(dtype).0 / 1e12
    }

    /// Square f16 GEMMs on an A100: about 100 of 312 TFLOP/s at 1024, 230 at 4096, 240 at 8192.
    #[test]
    fn square_products_saturate() {
        let a100 = |size| tflops("dgx-a100", square(size), DType::F16);
        assert!((80.0..170.0).contains(&a100(1024)), "{}", a100(1024));
        assert!((215.0..250.0).contains(&a100(4096)), "{}", a100(4096));
        assert!((230.0..255.0).contains(&a100(8192)), "{}", a100(8192));
    }

    /// Measured by us on an H200, each over 0.1 s, in TFLOP/s: bf16 and fp8.
    #[test]
    fn products_reach_what_was_measured() {
        let measured = [
            (8192, 4096, 4096, 675.0, 1230.0),
            (8192, 14336, 4096, 683.0, 1255.0),
            (16384, 4096, 14336, 670.0, 1264.0),
            (8192, 128_256, 4096, 685.0, 1285.0),
            (8192, 8192, 1024, 585.0, 1053.0),
            (8192, 6144, 768, 558.0, 971.0),
            (65536, 8192, 1024, 604.0, 1098.0),
            (8192, 1024, 8192, 644.0, 1298.0),
            (8192, 3584, 8192, 661.0, 1310.0),
            (16384, 16384, 16384, 683.0, 1291.0),
        ];
        for (rows, columns, depth, bf16, fp8) in measured {
            let product = Product { rows, columns, depth };
            for (dtype, measured) in [(DType::Bf16, bf16), (DType::Fp8, fp8)] {
                let ratio = tflops("dgx-h200", product, dtype) / measured;
                assert!((0.9..1.08).contains(&ratio), "{product:?} {dtype}: {ratio}");
            }
        }
    }

    #[test]
    fn four_bits_are_twice_as_fast_on_wide_matrices_and_wasted_on_shallow_ones() {
        let rate = |size, dtype| tflops("dgx-b200", square(size), dtype);
        let gain = |size| rate(size, DType::Nvfp4) / rate(size, DType::Fp8);
        assert!((1.9..=2.0).contains(&gain(16384)), "{}", gain(16384));
        assert!(gain(2048) < 1.85, "{}", gain(2048));
        assert_eq!(rate(8192, DType::Nvfp4), rate(8192, DType::Mxfp4));
        let h100 = |dtype| tflops("dgx-h100", square(8192), dtype);
        assert!(h100(DType::Nvfp4) <= h100(DType::Fp8), "computed as fp8");
    }

    #[test]
    fn a_column_too_many_costs_a_column_of_tiles() {
        let even = Product { rows: 4096, columns: 512, depth: 4096 };
        let odd = Product { columns: 513, ..even };
        let ratio = tflops("dgx-a100", odd, DType::F16) / tflops("dgx-a100", even, DType::F16);
        assert!((0.7..0.95).contains(&ratio), "{ratio}");
    }

    #[test]
    fn deep_and_narrow_products_are_cut_in_depth() {
        // Weight gradient of a small layer: 32 tiles, depth 65,536 tokens.
        let deep = Product { rows: 1024, columns: 1024, depth: 65536 };
        assert!(tflops("dgx-a100", deep, DType::F16) > 200.0);
        let shallow = Product { depth: 1024, ..deep };
        assert!(tflops("dgx-a100", shallow, DType::F16) < 150.0);
    }

    #[test]
    fn unaligned_rows_are_slow() {
        assert_eq!(alignment([4096, 50304], DType::Bf16), 1.0);
        assert_eq!(alignment([4096, 50257], DType::Bf16), 0.19);
        assert_eq!(alignment([4096, 4100], DType::F16), 0.34);
        assert_eq!(alignment([4096, 4112], DType::Nvfp4), 0.34);
        assert_eq!(alignment([4096, 50257], DType::F32), 1.0);
        assert_eq!(alignment([0, 4096], DType::Bf16), 1.0);
    }

    #[test]
    fn an_array_is_filled_by_multiples_of_its_width() {
        let tpu = |product| tflops("tpu-v4", product, DType::Bf16);
        let even = Product { rows: 8192, columns: 1024, depth: 1024 };
        assert!(tpu(even) > 0.8 * 275.0, "{}", tpu(even));
        let odd = Product { columns: 129, ..even };
        assert!((tpu(odd) / tpu(even) - 129.0 / 256.0).abs() < 1e-9);
        let short = Product { rows: 128, ..even };
        assert!((tpu(short) / tpu(even) - 0.5 / (8192.0 / 8320.0)).abs() < 1e-9);
    }

    #[test]
    fn what_has_no_matrix_unit_has_no_tiles() {
        let core = preset::get("laptop").unwrap().device;
        assert_eq!(square(3).efficiency(&core, DType::Bf16, 1.0), core.sustained_efficiency);
        let gpu = preset::get("dgx-a100").unwrap().device;
        assert_eq!(square(3).efficiency(&gpu, DType::F32, 1.0), gpu.sustained_efficiency);
        assert!(square(3).efficiency(&gpu, DType::Fp8, 1.0) < 1e-3, "computed as bf16");
    }

    proptest! {
        #[test]
        fn efficiency_is_a_share(rows: u64, columns: u64, depth: u64, batch in 1.0..1e6f64) {
            for name in ["dgx-h100", "tpu-v4", "laptop"] {
                let device = preset::get(name).unwrap().device;
                let product = Product { rows, columns, depth };
                let share = product.efficiency(&device, DType::Bf16, batch);
                prop_assert!(share > 0.0 && share <= 1.0, "{name}: {share}");
            }
        }

        /// A deeper GEMM never takes notably less time (15 % tolerance).
        #[test]
        fn deeper_products_take_longer(size in 1u64..5000, more in 1u64..5000) {
            let time = |depth: u64| {
                let product = Product { rows: size, columns: size, depth };
                product.flops() / tflops("dgx-a100", product, DType::F16)
            };
            prop_assert!(time(size) < time(size + more) * 1.15);
        }
    }
}
