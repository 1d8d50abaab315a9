//! Any text as a table of measured runs is refused with the file's name, or all of its rows are read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_sim::table::{astra, collectives, training};

fuzz_target!(|text: &str| {
    let told = [
        astra::rows(text, "table.csv").err().map(|error| error.to_string()),
        collectives::rows(text, "table.csv").err().map(|error| error.to_string()),
        training::rows(text, "table.csv").err().map(|error| error.to_string()),
    ];
    for told in told.into_iter().flatten() {
        assert!(told.contains("table.csv"), "{told}");
    }
});
