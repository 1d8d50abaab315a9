//! One device: how fast it computes, how much it holds, how fast it reads what it holds.

use paceline_plan::DType;
use paceline_plan::strategy::Store;
use paceline_plan::units::{Bytes, BytesPerSec, Flops, Seconds};
use serde::Serialize;
use std::ops::{Div, Mul};

/// A device, by its datasheet and by the share of the datasheet that is reached.
///
/// Peaks and shares are kept apart so that MFU stays a fraction of the published peak while times
/// come from what the device sustains.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// The product's name.
    pub name: String,
    /// Peak matrix-product rates, dense.
    pub peak: Peak,
    /// The share of the peak that the best of many shapes of matrix products reaches, alone and for
    /// a moment.
    pub max_efficiency: f64,
    /// The share of the peak that products keep up for hours, whatever their shape: a device at its
    /// power limit lowers its clocks.
    pub sustained_efficiency: f64,
    /// The share of that which programs reach that are written in the matrix instructions of
    /// earlier devices (on NVIDIA's, `mma.sync` in place of `wgmma` and `tcgen05`).
    pub older_instructions: f64,
    /// How many parts compute one tile of a product each, at once.
    pub multiprocessors: Option<u32>,
    /// The width of the arrays through which operands are pushed, where products are computed so.
    pub systolic_width: Option<u32>,
    /// How many times faster products are where two of each four weights are zero (2:4 sparsity).
    pub sparse_speedup: f64,
    /// Memory that a program can have.
    pub memory: Bytes,
    /// Peak rate of reading and writing that memory, both counted.
    pub memory_bandwidth: BytesPerSec,
    /// The share of the memory rate that streaming operators sustain.
    pub memory_efficiency: f64,
    /// What a kernel costs beyond its work when it was queued in time: the gap to the one before.
    pub launch_overhead: Seconds,
    /// How many copies run at once beside computations: messages on their way out and in. Without
    /// any, the units that compute do the copying. As many as needed if nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy_engines: Option<u32>,
    /// What it copies to or from its host's memory, in one direction, while its neighbours do the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_bandwidth: Option<BytesPerSec>,
    /// Its share of what the host's disks read or write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bandwidth: Option<BytesPerSec>,
}

/// Peak rates by element type; absent where the device has no unit for the type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Peak {
    /// Full single precision.
    pub f32: FlopsPerSec,
    /// Products of f32 matrices with ten-bit mantissas, which a program must ask for.
    pub tf32: Option<FlopsPerSec>,
    /// Products of bf16 matrices, accumulated in f32.
    pub bf16: Option<FlopsPerSec>,
    /// Products of f16 matrices, accumulated in f32.
    pub f16: Option<FlopsPerSec>,
    /// Products of fp8 matrices, accumulated in f32.
    pub fp8: Option<FlopsPerSec>,
}

/// Floating-point operations a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct FlopsPerSec(pub f64);

impl Mul<f64> for FlopsPerSec {
    type Output = Self;
    fn mul(self, times: f64) -> Self {
        Self(self.0 * times)
    }
}

impl Div<FlopsPerSec> for Flops {
    type Output = Seconds;
    fn div(self, rate: FlopsPerSec) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Device {
    /// The peak rate for matrices of this type.
    ///
    /// A type without a unit of its own is computed in the next wider one that has one, as
    /// libraries do: fp8 in bf16 or f16, those in f32. f32 never silently becomes tf32, because
    /// frameworks do not do that either unless asked. Integers do no floating-point work; they
    /// answer with f32's rate so that the question has an answer.
    pub fn rate(&self, dtype: DType) -> FlopsPerSec {
        let Peak { f32, tf32: _, bf16, f16, fp8 } = self.peak;
        match dtype {
            DType::F32 | DType::U32 | DType::U8 => f32,
            DType::Bf16 => bf16.unwrap_or(f32),
            DType::F16 => f16.unwrap_or(f32),
            DType::Fp8 => fp8.or(bf16).or(f16).unwrap_or(f32),
        }
    }

    /// Whether the device has a unit for this type, rather than computing it in a wider one.
    pub fn supports(&self, dtype: DType) -> bool {
        match dtype {
            DType::F32 | DType::U32 | DType::U8 => true,
            DType::Bf16 => self.peak.bf16.is_some(),
            DType::F16 => self.peak.f16.is_some(),
            DType::Fp8 => self.peak.fp8.is_some(),
        }
    }

    /// The rate at which a store outside the device's memory is filled or read, if it is known.
    pub fn store(&self, store: Store) -> Option<BytesPerSec> {
        match store {
            Store::Host => self.host_bandwidth,
            Store::Disk => self.disk_bandwidth,
        }
    }

    /// The rate that large matrix products of this type sustain.
    pub fn sustained(&self, dtype: DType) -> FlopsPerSec {
        self.rate(dtype) * self.sustained_efficiency
    }

    /// Whether it has many multiprocessors or arrays rather than a core or two: what only costs
    /// where hundreds of kernels' parts run at once costs here.
    pub fn is_accelerator(&self) -> bool {
        self.multiprocessors.is_some() || self.systolic_width.is_some()
    }

    /// What is left of this kind of device's clocks: less than 1 where it is held to less power than
    /// others of its kind. The best products of a moment lose a good tenth when they have to last,
    /// which is no loss of this one device; what is lost beyond that is.
    pub fn throttle(&self) -> f64 {
        (self.sustained_efficiency / (LASTING * self.max_efficiency)).min(1.0)
    }

    /// The rate at which streaming operators read and write memory.
    pub fn sustained_memory_bandwidth(&self) -> BytesPerSec {
        BytesPerSec(self.memory_bandwidth.0 * self.memory_efficiency)
    }
}

/// Of the rate that the best product has for a moment, what long runs of products have at the power
/// limit: 0.69 of 0.80 measured on an H200 at 700 W.
const LASTING: f64 = 0.86;

#[cfg(test)]
mod tests {
    use super::super::preset;
    use super::*;

    #[test]
    fn a_missing_type_is_computed_in_the_next_wider_one() {
        let v100 = preset::get("dgx1-v100").unwrap().device;
        assert!(v100.supports(DType::F16) && !v100.supports(DType::Bf16));
        assert_eq!(v100.rate(DType::F16), FlopsPerSec(125e12));
        assert_eq!(v100.rate(DType::Bf16), v100.rate(DType::F32));
        assert_eq!(v100.rate(DType::Fp8), v100.rate(DType::F16));
        let a100 = preset::get("dgx-a100").unwrap().device;
        assert_eq!(a100.rate(DType::Fp8), a100.rate(DType::Bf16));
        assert_eq!(a100.rate(DType::F32), FlopsPerSec(19.5e12), "not tf32 unless asked");
        let laptop = preset::get("laptop").unwrap().device;
        assert_eq!(laptop.rate(DType::Fp8), laptop.rate(DType::F32));
    }

    #[test]
    fn work_over_rate_is_time() {
        let a100 = preset::get("dgx-a100").unwrap().device;
        let time = Flops(312e12) / a100.sustained(DType::Bf16);
        assert!((time.0 - 1.0 / a100.sustained_efficiency).abs() < 1e-12);
        assert!(a100.sustained_memory_bandwidth() < a100.memory_bandwidth);
    }
}
