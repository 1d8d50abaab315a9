//! Compiles a loop once per instruction set and picks the widest one the processor has.

/// Runs `body` compiled for the widest vectors of this processor.
///
/// The compiler may only use wider registers, never fuse or reorder floating-point operations. So
/// every version computes the same bits, and they differ only in speed. `body` must be marked
/// `#[inline(always)]`, as must the functions it calls: code that is not inlined here stays
/// compiled for the baseline.
#[inline(always)]
pub(crate) fn vectorised<R>(body: impl FnOnce() -> R) -> R {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::is_x86_feature_detected as detected;
        if detected!("avx512f") && detected!("avx512vl") && detected!("avx512dq") {
            // SAFETY: the check above found the features that `avx512` enables.
            return unsafe { x86::avx512(body) };
        }
        if detected!("avx2") {
            // SAFETY: the check above found the feature that `avx2` enables.
            return unsafe { x86::avx2(body) };
        }
    }
    body()
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    #[target_feature(enable = "avx512f,avx512vl,avx512dq")]
    pub(super) fn avx512<R>(body: impl FnOnce() -> R) -> R {
        body()
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn avx2<R>(body: impl FnOnce() -> R) -> R {
        body()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::exp;
    use crate::ordered_sum;
    use crate::reference::random;

    #[inline(always)]
    fn body(x: &[f32]) -> f32 {
        ordered_sum::sum([x], |[v]| exp(v) * 0.1 + v)
    }

    #[test]
    fn every_instruction_set_computes_the_bits_of_the_baseline() {
        let x = random("x", 1000);
        assert_eq!(
            vectorised(
                #[inline(always)]
                || body(&x)
            )
            .to_bits(),
            body(&x).to_bits()
        );
    }
}
