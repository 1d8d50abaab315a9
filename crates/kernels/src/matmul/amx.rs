//! Tile registers of AMX: detection, permission and configuration.
//!
//! Linux gives a process their state only on request (kernel documentation, "Using XSTATE features
//! in user space applications"). A thread configures them before its tiles and releases them after,
//! since their 8 KiB are saved with every thread that is switched while it holds them.

/// Tile registers of this thread, configured as eight of 16 rows of 64 bytes until dropped.
pub(super) struct Configured(());

#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
pub(super) use x86::is_permitted;

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use super::Configured;
    use std::arch::asm;

    /// Configuration of `LDTILECFG` (Intel SDM, volume 1, section 18.2).
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static CONFIG: Config = Config {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    impl Configured {
        /// # Safety
        ///
        /// The processor must have AMX, and [`is_permitted`] must have returned true.
        pub(in crate::matmul) unsafe fn new() -> Self {
            // SAFETY: the caller guarantees the instruction, and the operand is a valid
            // configuration; no compiled code uses these registers.
            unsafe {
                asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly))
            };
            Self(())
        }
    }

    impl Drop for Configured {
        fn drop(&mut self) {
            // SAFETY: whoever created this had the instruction.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }

    /// Returns true if the processor multiplies tiles of bfloat16 and the kernel lets this process
    /// use them.
    #[cfg(target_os = "linux")]
    pub(in crate::matmul) fn is_permitted() -> bool {
        use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
        use std::sync::LazyLock;

        #[target_feature(enable = "xsave")]
        fn enabled() -> u64 {
            // SAFETY: register 0 exists wherever the instruction does.
            unsafe { _xgetbv(0) }
        }

        static PERMITTED: LazyLock<bool> = LazyLock::new(|| {
            // Bits of leaf 7 (AMX-BF16, AMX-TILE) and of XCR0 (TILECFG, TILEDATA).
            const UNITS: u32 = 1 << 22 | 1 << 24;
            const STATE: u64 = 1 << 17 | 1 << 18;
            let has = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & UNITS == UNITS;
            // SAFETY: the macro has found the instruction.
            let saved =
                || is_x86_feature_detected!("xsave") && unsafe { enabled() } & STATE == STATE;
            has && saved() && request()
        });
        *PERMITTED
    }

    /// Asks for the state of the tile registers: `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`.
    #[cfg(target_os = "linux")]
    fn request() -> bool {
        let result: i64;
        // SAFETY: the system call changes nothing but this process's permission.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") 158i64 => result,
                in("rdi") 0x1023i64,
                in("rsi") 18i64,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        result == 0
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
impl Configured {
    /// # Safety
    ///
    /// Never called: no kernel of another processor has tile registers.
    pub(super) unsafe fn new() -> Self {
        unreachable!("no tile registers")
    }
}
