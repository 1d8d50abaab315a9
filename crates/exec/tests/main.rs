//! The tests of training, in one binary: linking one per file took most of a clean build.

mod checkpoints;
mod clicks;
mod common;
mod compression;
mod described;
mod experts;
mod families;
mod hogwild;
mod images;
mod layouts;
mod local_sgd;
mod multi_token;
mod offload;
mod pairs;
mod part;
mod pipedream;
mod precision;
mod promises;
mod random_layouts;
mod reference;
mod runs;
mod serving;
mod trained;
mod transformers;
