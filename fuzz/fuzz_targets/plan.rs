//! Any text as a plan is refused, or prints to a text that is the same plan.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_plan::{text, validate};

fuzz_target!(|written: &str| {
    if let Ok(plan) = text::parse(written) {
        let printed = text::print(&plan);
        let again = text::parse(&printed).expect("what is printed is read");
        assert_eq!(text::print(&again), printed);
        let _ = validate::validate(&plan, None);
    }
});
