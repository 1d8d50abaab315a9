//! One GEMM alone: time, tiles, waves, utilisation and what bounds it, also with sparse operands.

use super::product::{Product, alignment};
use crate::cluster::Device;
use paceline_plan::DType;
use paceline_plan::units::{Bytes, Seconds};
use serde::Serialize;

/// A GEMM: M × K times K × N, where the K × N operand holds the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Rows of the activations and of the result.
    pub m: u64,
    /// Columns of the weights and of the result.
    pub n: u64,
    /// Columns of the activations and rows of the weights.
    pub k: u64,
}

/// Zeros in the operands, and their use.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sparsity {
    /// Fraction of the weights that is zero, anywhere.
    pub weights: f64,
    /// Fraction of the activations that is zero, anywhere.
    pub activations: f64,
    /// Operations that the device skips.
    pub skipped: Skipped,
    /// True if two of every four weights are zero and the device has units for that.
    pub two_of_four: bool,
}

/// Operations with a zero that a device skips.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Skipped {
    /// None: tensor cores and rigid systolic arrays compute with zeros like with other numbers.
    #[default]
    None,
    /// Those of zero weights: only other weights are placed in the array.
    Weights,
    /// Those of zero weights and of zero activations, as in Qin et al., "SIGMA: A Sparse and
    /// Irregular GEMM Accelerator" (HPCA 2020).
    Both,
}

impl std::str::FromStr for Skipped {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "weights" => Ok(Self::Weights),
            "both" => Ok(Self::Both),
            _ => Err(format!("'{text}' is none of: none, weights, both")),
        }
    }
}

/// Side of the roofline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Arithmetic takes longer than moving the operands.
    Compute,
    /// Moving the operands takes longer.
    Memory,
    /// Arithmetic takes longer only because the product fills tiles and waves badly.
    Tiles,
}

/// One GEMM on one device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GemmTime {
    /// Time, with the gap of a launch.
    pub time: Seconds,
    /// Time of the arithmetic at the rate that the shape allows.
    pub compute: Seconds,
    /// Time to move the operands.
    pub memory: Seconds,
    /// Height and width of a tile; of a weight tile for systolic arrays.
    pub tile: [u32; 2],
    /// Parts into which the depth is divided (GPUs), or the rows (systolic arrays).
    pub parts: u32,
    /// Number of tiles, all parts together.
    pub tiles: u64,
    /// Number of waves: tiles over the units that compute them, rounded up.
    pub waves: u64,
    /// Fraction of the peak rate that all operations, also with zeros, reach.
    pub utilisation: f64,
    /// Fraction of the peak rate that operations without zeros reach.
    pub useful: f64,
    /// Operations per byte moved.
    pub intensity: f64,
    /// Intensity above which the device is bound by arithmetic at its peak rate.
    pub ridge: f64,
    /// Operations per second, also with zeros.
    pub rate: f64,
    /// Side of the roofline.
    pub bound: Bound,
}

/// Times a GEMM alone on a device.
///
/// A sparse operand is stored as a bit per element and its other elements; one without zeros, or of
/// a device that skips nothing, as it is.
pub fn gemm(device: &Device, shape: GemmShape, dtype: DType, zeros: Sparsity) -> GemmTime {
    let GemmShape { m, n, k } = shape;
    let skips_weights = zeros.skipped != Skipped::None;
    let skips_activations = zeros.skipped == Skipped::Both;
    let kept = |share: f64, skips: bool| if skips { 1.0 - share } else { 1.0 };
    let weights = kept(zeros.weights, skips_weights);
    let activations = kept(zeros.activations, skips_activations);
    let product = Product { rows: m, columns: n, depth: k };
    let tiling = product.tiling(device, dtype);
    let faster = if zeros.two_of_four { device.sparse_speedup } else { 1.0 };
    let aligned = if device.is_accelerator() { alignment([n, k], dtype) } else { 1.0 };
    let peak = device.rate(dtype).0;
    let dense = product.flops();
    let rate = peak * product.efficiency(device, dtype, 1.0) * faster * aligned;
    let compute = dense * weights * activations / rate;

    let size = dtype.size() as f64;
    let stored = |elements: f64, kept: f64| match kept < 1.0 {
        true => elements * (kept * size + 1.0 / 8.0),
        false => elements * size,
    };
    let weight_bytes = match zeros.two_of_four {
        // Two of four values, and two bits for the place of each (NVIDIA A100 whitepaper).
        true => k as f64 * n as f64 * (size / 2.0 + 0.125),
        false => stored(k as f64 * n as f64, weights),
    };
    let bytes =
        stored(m as f64 * k as f64, activations) + weight_bytes + m as f64 * n as f64 * size;
    let memory = bytes / device.sustained_memory_bandwidth().0;
    let time = compute.max(memory) + device.launch_overhead.0;
    let nonzero = (1.0 - zeros.weights) * (1.0 - zeros.activations);
    let nonzero = if zeros.two_of_four { nonzero.min(0.5) } else { nonzero };
    GemmTime {
        time: Seconds(time),
        compute: Seconds(compute),
        memory: Seconds(memory),
        tile: tiling.tile,
        parts: tiling.parts,
        tiles: tiling.tiles,
        waves: tiling.waves,
        utilisation: dense * weights * activations / (time * peak),
        useful: dense * nonzero / (time * peak),
        intensity: dense * weights * activations / bytes,
        ridge: peak / device.memory_bandwidth.0,
        rate: dense * weights * activations / time,
        bound: if memory >= compute {
            Bound::Memory
        } else if dense * weights * activations / (peak * faster) >= memory {
            Bound::Compute
        } else {
            Bound::Tiles
        },
    }
}

/// Bytes of a dense GEMM's operands, each moved once.
pub fn gemm_bytes(shape: GemmShape, dtype: DType) -> Bytes {
    let GemmShape { m, n, k } = shape;
    let elements = m.saturating_mul(k).saturating_add(k.saturating_mul(n));
    Bytes(elements.saturating_add(m.saturating_mul(n)).saturating_mul(dtype.size()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;

    fn device(name: &str) -> Device {
        preset::get(name).unwrap().device
    }

    fn shape(m: u64, n: u64, k: u64) -> GemmShape {
        GemmShape { m, n, k }
    }

    /// NVIDIA, "Matrix Multiplication Background User's Guide": 6912 × 2048 in tiles of 256 × 128 are
    /// 27 × 16 = 432 tiles, four waves of the A100's 108 multiprocessors; a few rows more fit
    /// no tiles as well.
    #[test]
    fn tiles_make_waves() {
        let a100 = device("dgx-a100");
        let dense = Sparsity::default();
        let even = gemm(&a100, shape(6912, 2048, 4096), DType::F16, dense);
        assert_eq!((even.tiles, even.waves, even.tile), (432, 4, [256, 128]));
        let odd = gemm(&a100, shape(7168, 2048, 4096), DType::F16, dense);
        assert!(odd.utilisation < even.utilisation, "{odd:?} {even:?}");
    }

    /// The same units as one array of 512 × 512 or as 16 of 128 × 128 have the same peak; the small
    /// ones lose less to shapes that do not fill them.
    #[test]
    fn several_small_arrays_suit_irregular_shapes() {
        let small = Device { systolic_width: Some(128), systolic_arrays: 16, ..device("tpu-v4") };
        let large = Device { systolic_width: Some(512), systolic_arrays: 1, ..small.clone() };
        let at = |device: &Device, m, n, k| {
            gemm(device, shape(m, n, k), DType::Bf16, Sparsity::default()).compute.0
        };
        assert!(at(&small, 2048, 130, 4096) < 0.6 * at(&large, 2048, 130, 4096));
        let (few, one) = (at(&small, 65536, 8192, 8192), at(&large, 65536, 8192, 8192));
        assert!((few / one - 1.0).abs() < 0.05, "{few} {one}");
    }

    #[test]
    fn zeros_help_those_who_skip_them() {
        let tpu = device("tpu-v4");
        let big = shape(8192, 4096, 4096);
        let time = |zeros| gemm(&tpu, big, DType::Bf16, zeros);
        let zeros = Sparsity { weights: 0.8, activations: 0.5, ..Sparsity::default() };
        let (dense, rigid) = (time(Sparsity::default()), time(zeros));
        assert_eq!(dense.time, rigid.time);
        assert!((rigid.useful / dense.useful - 0.1).abs() < 1e-12);
        let skips = |skipped| time(Sparsity { skipped, ..zeros }).compute.0;
        assert!((skips(Skipped::Weights) / dense.compute.0 - 0.2).abs() < 1e-12);
        assert!((skips(Skipped::Both) / dense.compute.0 - 0.1).abs() < 1e-12);
        let a100 = device("dgx-a100");
        let two_of_four = Sparsity { two_of_four: true, ..Sparsity::default() };
        let half = gemm(&a100, big, DType::Bf16, two_of_four).compute.0;
        let whole = gemm(&a100, big, DType::Bf16, Sparsity::default()).compute.0;
        assert!((whole / half - a100.sparse_speedup).abs() < 1e-12);
    }

    #[test]
    fn the_side_of_the_roofline_follows_from_the_intensity() {
        let a100 = device("dgx-a100");
        let dense = Sparsity::default();
        let vector = gemm(&a100, shape(1, 4096, 4096), DType::Bf16, dense);
        assert_eq!(vector.bound, Bound::Tiles, "one row of a tile of 64");
        let rows = gemm(&a100, shape(64, 4096, 4096), DType::Bf16, dense);
        assert_eq!(rows.bound, Bound::Memory, "{rows:?}");
        assert!(vector.intensity < 1.01 && vector.ridge > 100.0, "{vector:?}");
        let square = gemm(&a100, shape(4096, 4096, 4096), DType::Bf16, dense);
        assert_eq!(square.bound, Bound::Compute);
        assert!((square.intensity - 4096.0 / 3.0).abs() < 1.0);
        assert_eq!(gemm_bytes(shape(4096, 4096, 4096), DType::Bf16), Bytes(3 << 25));
    }
}
