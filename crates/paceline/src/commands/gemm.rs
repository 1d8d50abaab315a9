//! `paceline gemm`: one matrix product on a device.

use crate::failure::Failure;
use crate::flags::{ClusterFlags, CommonFlags, Origins, Problems, real, word};
use crate::output::{Place, write};
use crate::overview::{count, percent, table};
use crate::plot::{RooflinePlot, RooflinePoint};
use crate::sweep::SweepFlags;
use clap::Args;
use paceline_plan::DType;
use paceline_sim::cluster::Cluster;
use paceline_sim::compute::{Bound, GemmShape, GemmTime, Skipped, Sparsity, gemm, gemm_bytes};
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;

/// Simulate one matrix product on one device
///
/// Reports the time, the tiles and waves in which the device computes it, the fraction of its peak,
/// the operations per byte, and which side of the roofline bounds it.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Shapes: M,N,K for M×K activations times K×N weights, or M×N×K as MxNxK; several are separated
    /// by semicolons
    #[arg(long, value_name = "M,N,K[;…]", help_heading = "Product")]
    shape: Option<String>,
    /// Dtype of the operands: f32, bf16, f16, fp8, nvfp4 or mxfp4 [default: the device's fastest for training]
    #[arg(long, value_name = "TYPE", help_heading = "Product")]
    dtype: Option<String>,
    /// Fraction of zeros among the weights, anywhere [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true, help_heading = "Product")]
    weight_sparsity: Option<String>,
    /// Fraction of zeros among the activations, anywhere [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true, help_heading = "Product")]
    activation_sparsity: Option<String>,
    /// Operations that the device skips: none, weights (with a zero weight) or both (with a zero
    /// operand) [default: none]
    #[arg(long, value_name = "WHICH", help_heading = "Product")]
    skip: Option<String>,
    /// Two of every four weights are zero, and the device's sparse units are used
    #[arg(long, help_heading = "Product")]
    sparse_weights: bool,
    /// Draw the roofline of the device with the products below it
    #[arg(long, value_name = "FILE.svg", conflicts_with = "vary", help_heading = "General")]
    roofline: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterFlags,
    #[command(flatten)]
    pub(super) sweep: SweepFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

impl Flags {
    /// Returns true if a picture is requested.
    pub(super) fn has_picture(&self) -> bool {
        self.roofline.is_some()
    }
}

/// Default columns of a study of products.
pub(super) const USUAL: [&str; 4] = ["time_s", "utilisation", "waves", "intensity"];

const EXAMPLES: &str = "\
Examples:
  paceline gemm --shape 4096,4096,4096 --cluster dgx-a100
  paceline gemm --shape \"128,2048,4096; 2048,1,128\" --cluster tpu-v4 --roofline roof.svg
  paceline gemm --shape 8192,4096,4096 --cluster dgx-a100 --sparse-weights
  paceline gemm --shape 1024,4096,4096 --cluster tpu-v4 --weight-sparsity 0.8 --skip weights
  paceline gemm --shape 1024,1100,4096 --cluster tpu-v4 \\
                --vary device.systolic_width+device.systolic_arrays=128+8,256+2";

/// One product.
#[derive(Serialize)]
struct Record {
    #[serde(flatten)]
    place: Place,
    device: String,
    m: u64,
    n: u64,
    k: u64,
    dtype: String,
    weight_sparsity: f64,
    activation_sparsity: f64,
    skip: Skipped,
    sparse_weights: bool,
    flops: f64,
    bytes: u64,
    time_s: f64,
    compute_s: f64,
    memory_s: f64,
    tile: [u32; 2],
    parts: u32,
    tiles: u64,
    waves: u64,
    utilisation: f64,
    useful_utilisation: f64,
    flops_per_s: f64,
    intensity: f64,
    ridge: f64,
    bound: Bound,
}

/// The validated request.
struct Request {
    shapes: Vec<GemmShape>,
    dtype: DType,
    sparsity: Sparsity,
    cluster: Cluster,
}

/// Prints the products, and draws them.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let request = check(flags, origins)?;
    let records: Vec<Record> = request.shapes.iter().map(|&s| record(&request, s)).collect();
    let output = flags.common.output();
    if let Some(path) = &flags.roofline {
        let title = flags.sweep.title.clone();
        let svg = picture(&request, &records, title).to_svg();
        write(path, svg.as_bytes()).map_err(|error| {
            Failure::Run(anyhow::anyhow!("{} cannot be written: {error}", path.display()))
        })?;
        output.note(&format!("wrote {}", path.display()));
    }
    if output.is_json() {
        for record in &records {
            output.print_json(record)?;
        }
        return Ok(());
    }
    Ok(output.print(&text(&request, &records))?)
}

/// Returns the result of a single product as one JSON object.
pub(super) fn result(flags: &Flags, origins: Origins) -> Result<Value, Failure> {
    let request = check(flags, origins)?;
    let [shape] = request.shapes[..] else {
        return Err(Failure::flag("--shape", "with --vary, give one shape or vary shape"));
    };
    serde_json::to_value(record(&request, shape)).map_err(|error| Failure::Run(error.into()))
}

fn check(flags: &Flags, origins: Origins) -> Result<Request, Failure> {
    let mut problems = Problems::new(origins);
    let shapes = match &flags.shape {
        Some(text) => shapes(text).map_err(|what| problems.add("--shape", what)).ok(),
        None => {
            problems.add("--shape", "missing; for example --shape 4096,4096,4096");
            None
        }
    };
    let cluster = flags.cluster.required(&mut problems);
    let dtype = word("--dtype", &flags.dtype, &mut problems);
    let mut share = |flag: &str, text: &Option<String>| {
        real(flag, text.as_deref(), 0.0..=0.999, &mut problems).unwrap_or(0.0)
    };
    let weights = share("--weight-sparsity", &flags.weight_sparsity);
    let activations = share("--activation-sparsity", &flags.activation_sparsity);
    let skipped: Skipped = word("--skip", &flags.skip, &mut problems).unwrap_or_default();
    if flags.sparse_weights && (weights > 0.0 || skipped != Skipped::None) {
        let what = "half of the weights are zero already; leave out --weight-sparsity and --skip";
        problems.add("--sparse-weights", what);
    }
    let (Some(shapes), Some(cluster), true) = (shapes, cluster, problems.is_empty()) else {
        return Err(problems.into());
    };
    let two_of_four = flags.sparse_weights;
    let dtype = dtype.unwrap_or_else(|| {
        let known = [DType::Bf16, DType::F16];
        known.into_iter().find(|&dtype| cluster.device.supports(dtype)).unwrap_or(DType::F32)
    });
    let sparsity = Sparsity { weights, activations, skipped, two_of_four };
    Ok(Request { shapes, dtype, sparsity, cluster })
}

/// Parses shapes: three numbers each.
fn shapes(text: &str) -> Result<Vec<GemmShape>, String> {
    const MOST: u64 = 1 << 32;
    let one = |text: &str| {
        let numbers = text.split([',', 'x', '×']).map(|number| {
            let found = number.trim().parse::<u64>().ok().filter(|n| (1..=MOST).contains(n));
            found.ok_or_else(|| {
                format!("'{}' is not a whole number from 1 to {MOST}", number.trim())
            })
        });
        let numbers: Vec<u64> = numbers.collect::<Result<_, _>>()?;
        if numbers.is_empty() || !numbers.len().is_multiple_of(3) {
            let found = text.trim();
            return Err(format!("'{found}' is not M,N,K: rows, columns and depth of a product"));
        }
        let triples = numbers.as_chunks::<3>().0.iter();
        Ok(triples.map(|&[m, n, k]| GemmShape { m, n, k }).collect::<Vec<_>>())
    };
    let all: Result<Vec<_>, String> = text.split(';').map(one).collect();
    Ok(all?.concat())
}

fn record(request: &Request, shape: GemmShape) -> Record {
    let Request { dtype, sparsity, ref cluster, .. } = *request;
    let found: GemmTime = gemm(&cluster.device, shape, dtype, sparsity);
    let GemmShape { m, n, k } = shape;
    Record {
        place: Place::from(cluster),
        device: cluster.device.name.clone(),
        m,
        n,
        k,
        dtype: dtype.to_string(),
        weight_sparsity: sparsity.weights,
        activation_sparsity: sparsity.activations,
        skip: sparsity.skipped,
        sparse_weights: sparsity.two_of_four,
        flops: 2.0 * m as f64 * n as f64 * k as f64,
        bytes: gemm_bytes(shape, dtype).0,
        time_s: found.time.0,
        compute_s: found.compute.0,
        memory_s: found.memory.0,
        tile: found.tile,
        parts: found.parts,
        tiles: found.tiles,
        waves: found.waves,
        utilisation: found.utilisation,
        useful_utilisation: found.useful,
        flops_per_s: found.rate,
        intensity: found.intensity,
        ridge: found.ridge,
        bound: found.bound,
    }
}

fn text(request: &Request, records: &[Record]) -> String {
    let device = &request.cluster.device;
    let peak = device.rate(request.dtype).0 / 1e12;
    let head = [
        "M",
        "N",
        "K",
        "time",
        "tiles",
        "of",
        "parts",
        "waves",
        "of peak",
        "without zeros",
        "op/byte",
        "bound",
    ];
    let rows = records.iter().map(|record| {
        let bound = match record.bound {
            Bound::Compute => "compute",
            Bound::Memory => "memory",
            Bound::Tiles => "tiles",
        };
        vec![
            count(record.m),
            count(record.n),
            count(record.k),
            paceline_plan::units::Seconds(record.time_s).to_string(),
            count(record.tiles),
            format!("{}×{}", record.tile[0], record.tile[1]),
            record.parts.to_string(),
            count(record.waves),
            percent(record.utilisation),
            percent(record.useful_utilisation),
            format!("{:.1}", record.intensity),
            bound.to_owned(),
        ]
    });
    format!(
        "{} in {}: {peak:.1} TFLOP/s at most, {:.0} GB/s of memory bandwidth, the roof's ridge at {:.0} \
         operations per byte\n{}",
        device.name,
        request.dtype,
        device.memory_bandwidth.0 / 1e9,
        records.first().map_or(0.0, |record| record.ridge),
        table(&head, 0, rows)
    )
}

fn picture(request: &Request, records: &[Record], title: Option<String>) -> RooflinePlot {
    let device = &request.cluster.device;
    let whole: f64 = records.iter().map(|record| record.time_s).sum();
    let points = records.iter().map(|record| RooflinePoint {
        name: format!("{}×{}×{}", record.m, record.n, record.k),
        intensity: record.intensity,
        rate: record.flops_per_s,
        share: record.time_s / whole,
        colour: match record.bound {
            Bound::Compute => 1,
            Bound::Memory => 2,
            Bound::Tiles => 4,
        },
    });
    RooflinePlot {
        title: title.unwrap_or_else(|| format!("Products on {}", device.name)),
        bandwidth: device.memory_bandwidth.0,
        ceilings: vec![(request.dtype.to_string(), device.rate(request.dtype).0)],
        points: points.collect(),
        note: "area: share of the time".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_three_numbers_each() {
        let shape = |m, n, k| GemmShape { m, n, k };
        assert_eq!(shapes("1,2,3"), Ok(vec![shape(1, 2, 3)]));
        assert_eq!(shapes("1x2x3"), Ok(vec![shape(1, 2, 3)]));
        let two = Ok(vec![shape(1, 2, 3), shape(4, 5, 6)]);
        assert_eq!(shapes("1,2,3; 4×5×6"), two);
        assert_eq!(shapes("1,2,3,4,5,6"), two);
        for wrong in ["", "1", "1,2", "1,2,3,4", "0,1,1", "1,1,x", "1,1,99999999999", "1,2,3;"] {
            assert!(shapes(wrong).is_err(), "{wrong}");
        }
    }
}
