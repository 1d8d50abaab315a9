//! The command line as a user meets it: the built binary, its exit status, its words, its JSON.

mod cli {
    mod config;
    mod input;
    mod json;
    mod processes;
    mod runs;
    mod studies;
    pub(crate) mod support;
}
