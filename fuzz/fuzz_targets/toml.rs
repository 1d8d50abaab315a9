//! Any text as a model or cluster file is refused with the file's name, or is read back from what is
//! printed of it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_plan::model::Model;
use paceline_sim::cluster::Cluster;

fuzz_target!(|text: &str| {
    match Model::parse(text, "file.toml") {
        Ok(model) => assert_eq!(Model::parse(&model.to_toml(), "again.toml").as_ref(), Ok(&model)),
        Err(problems) => assert!(problems.to_string().contains("file.toml")),
    }
    match Cluster::parse(text, "file.toml") {
        Ok(cluster) => {
            let again = cluster.to_toml();
            assert!(Cluster::parse(&again, "again.toml").is_ok(), "{again}");
        }
        Err(problems) => assert!(problems.to_string().contains("file.toml")),
    }
});
