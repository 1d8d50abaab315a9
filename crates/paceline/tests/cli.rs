//! The command line as a user meets it: the built binary, its exit status, its words, its JSON.

mod cli {
    mod bench;
    mod config;
    mod examples;
    mod input;
    mod json;
    mod processes;
    mod recovery;
    mod runs;
    mod studies;
    pub(crate) mod support;
}
