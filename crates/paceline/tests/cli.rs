//! Tests the built binary as a user runs it: exit status, text and JSON.

mod cli {
    mod bench;
    mod config;
    mod engines;
    mod examples;
    mod experts;
    mod faults;
    mod graphs;
    mod hostile;
    mod input;
    mod json;
    mod json_page;
    mod log;
    mod pages;
    mod processes;
    mod readme;
    mod recovery;
    mod resume;
    mod runs;
    mod search;
    mod security;
    mod studies;
    pub(crate) mod support;
}
