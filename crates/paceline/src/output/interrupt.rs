//! Ctrl-C.

use super::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that Ctrl-C sets; a second Ctrl-C leaves at once. Where it cannot be heard, a note says what
/// that means for the command.
pub(crate) fn stop_on_interrupt(output: &Output, unheard: &str) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let handled = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    if let Err(error) = handled {
        output.note(&format!("note: Ctrl-C will {unheard} ({error})"));
    }
    stop
}
