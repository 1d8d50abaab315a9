//! Device model: compute rates, memory size and memory bandwidth.

use paceline_plan::DType;
use paceline_plan::strategy::Store;
use paceline_plan::units::{Bytes, BytesPerSec, Flops, Seconds};
use serde::Serialize;
use std::ops::{Div, Mul};

/// A device: its datasheet values and the fractions of them that are reached.
///
/// Peaks and fractions are separate so that MFU stays a fraction of the published peak, while times
/// come from the sustained rates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Product name.
    pub name: String,
    /// Peak dense GEMM rates.
    pub peak: Peak,
    /// Fraction of the peak that the best of many GEMM shapes reaches in a short run alone.
    pub max_efficiency: f64,
    /// Fraction of the peak that GEMMs of any shape sustain for hours: a device at its power limit
    /// lowers its clocks.
    pub sustained_efficiency: f64,
    /// Fraction of that rate reached by programs that use the matrix instructions of earlier
    /// devices (on NVIDIA's, `mma.sync` instead of `wgmma` and `tcgen05`).
    pub legacy_mma_efficiency: f64,
    /// Number of units that each compute one tile of a GEMM concurrently.
    pub multiprocessors: Option<u32>,
    /// Width of the systolic arrays, if GEMMs run on such.
    pub systolic_width: Option<u32>,
    /// Number of systolic arrays, which work on different tiles; at least 1.
    pub systolic_arrays: u32,
    /// GEMM speedup if two of every four weights are zero (2:4 sparsity).
    pub sparse_speedup: f64,
    /// Memory available to a program.
    pub memory: Bytes,
    /// Peak memory bandwidth, reads plus writes.
    pub memory_bandwidth: BytesPerSec,
    /// Fraction of the memory bandwidth that streaming operators sustain.
    pub memory_efficiency: f64,
    /// Overhead of a kernel that was queued in time: the gap to the previous one.
    pub launch_overhead: Seconds,
    /// Number of copies (outgoing and incoming messages) that run concurrently with compute. With
    /// 0, the compute units do the copying. Unlimited if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy_engines: Option<u32>,
    /// Copy bandwidth to or from host memory, per direction, while neighbours copy too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_bandwidth: Option<BytesPerSec>,
    /// Its share of the host's disk bandwidth, for reads or writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bandwidth: Option<BytesPerSec>,
    /// Rated power in watts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<f64>,
    /// Power in watts while it does not compute; 0 if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_power: Option<f64>,
}

/// Peak rates by dtype; absent if the device has no unit for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Peak {
    /// Full single precision.
    pub f32: FlopsPerSec,
    /// GEMMs of f32 matrices with ten-bit mantissas, which a program must request.
    pub tf32: Option<FlopsPerSec>,
    /// GEMMs of bf16 matrices, accumulated in f32.
    pub bf16: Option<FlopsPerSec>,
    /// GEMMs of f16 matrices, accumulated in f32.
    pub f16: Option<FlopsPerSec>,
    /// GEMMs of fp8 matrices, accumulated in f32.
    pub fp8: Option<FlopsPerSec>,
    /// GEMMs of 4-bit matrices with scaled blocks (nvfp4, mxfp4), accumulated in f32.
    pub fp4: Option<FlopsPerSec>,
}

/// Floating-point operations per second.
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
    /// Peak rate for matrices of this dtype.
    ///
    /// A dtype without its own unit is computed in the next wider one that has one, as libraries
    /// do: 4-bit types in fp8, fp8 in bf16 or f16, those in f32. f32 never silently becomes tf32, because frameworks do
    /// not do that either unless asked. Integers do no floating-point work; they return f32's rate
    /// so that the function is total.
    pub fn rate(&self, dtype: DType) -> FlopsPerSec {
        let Peak { f32, tf32: _, bf16, f16, fp8, fp4 } = self.peak;
        match dtype {
            DType::F32 | DType::U32 | DType::U8 => f32,
            DType::Bf16 => bf16.unwrap_or(f32),
            DType::F16 => f16.unwrap_or(f32),
            DType::Fp8 => fp8.or(bf16).or(f16).unwrap_or(f32),
            DType::Nvfp4 | DType::Mxfp4 => fp4.or(fp8).or(bf16).or(f16).unwrap_or(f32),
        }
    }

    /// Returns true if the device has a unit for this dtype instead of computing it in a wider one.
    pub fn supports(&self, dtype: DType) -> bool {
        match dtype {
            DType::F32 | DType::U32 | DType::U8 => true,
            DType::Bf16 => self.peak.bf16.is_some(),
            DType::F16 => self.peak.f16.is_some(),
            DType::Fp8 => self.peak.fp8.is_some(),
            DType::Nvfp4 | DType::Mxfp4 => self.peak.fp4.is_some(),
        }
    }

    /// Bandwidth of an offload store, if known.
    pub fn store(&self, store: Store) -> Option<BytesPerSec> {
        match store {
            Store::Host => self.host_bandwidth,
            Store::Disk => self.disk_bandwidth,
        }
    }

    /// Rate that large GEMMs of this dtype sustain.
    pub fn sustained(&self, dtype: DType) -> FlopsPerSec {
        self.rate(dtype) * self.sustained_efficiency
    }

    /// Returns true if it has many multiprocessors or arrays instead of a few cores. Some costs
    /// arise only if hundreds of kernel blocks run at once.
    pub fn is_accelerator(&self) -> bool {
        self.multiprocessors.is_some() || self.systolic_width.is_some()
    }

    /// Returns true if the matrix units are of Blackwell's generation, recognised by what is left of
    /// their rate with instructions of earlier ones.
    pub(crate) fn has_fifth_generation_units(&self) -> bool {
        self.legacy_mma_efficiency < 0.5
    }

    /// Clock factor of this device: below 1 if its power limit is lower than that of others of its
    /// kind. Every device loses over a tenth of its short-run GEMM rate in long runs; only a loss
    /// beyond that counts.
    pub fn throttle(&self) -> f64 {
        (self.sustained_efficiency / (SUSTAINED * self.max_efficiency)).min(1.0)
    }

    /// Rate at which streaming operators read and write memory.
    pub fn sustained_memory_bandwidth(&self) -> BytesPerSec {
        BytesPerSec(self.memory_bandwidth.0 * self.memory_efficiency)
    }
}

/// Ratio of the GEMM rate in long runs at the power limit to the best short-run rate: 0.69 of 0.80,
/// measured on an H200 at 700 W.
const SUSTAINED: f64 = 0.86;

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
