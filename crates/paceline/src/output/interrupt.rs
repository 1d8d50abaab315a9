//! Handling of Ctrl-C.

use super::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns a flag that Ctrl-C sets; a second Ctrl-C exits at once. If no handler can be installed,
/// prints a note with the effect of Ctrl-C, `unheard`.
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
