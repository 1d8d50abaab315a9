//! Tests that every example of `docs/clusters.md`, whole file or fragment, can be simulated.

use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::strategy::Strategy;
use paceline_sim::cluster::Cluster;
use paceline_sim::{NetworkKind, Options, simulate};

const PAGE: &str = include_str!("../../../docs/clusters.md");

/// TOML blocks of the page: whole files unchanged, fragments appended to the first block.
fn files() -> Vec<String> {
    let blocks = PAGE.split("```toml\n").skip(1);
    let blocks: Vec<&str> = blocks.filter_map(|rest| rest.split("```").next()).collect();
    let whole = |block: &str| block.starts_with("name");
    blocks
        .iter()
        .map(|block| match whole(block) {
            true => (*block).to_owned(),
            false => format!("{}{block}", blocks[0]),
        })
        .collect()
}

#[test]
fn every_example_is_read_printed_and_simulated() {
    let files = files();
    assert!(files.len() >= 8, "{} examples", files.len());
    let mini = built_in::get("mini").unwrap().unwrap();
    let (seq, global_batch) = (mini.seq, 16);
    let layout = Strategy { dp: 4, pp: 2, leaves: 4, seq, global_batch, ..Strategy::default() };
    let plan = lower(&mini, &layout).unwrap();
    for file in files {
        let cluster = Cluster::parse(&file, "docs/clusters.md").unwrap();
        assert_eq!(Cluster::parse(&cluster.to_toml(), "printed"), Ok(cluster.clone()), "{file}");
        for network in NetworkKind::ALL {
            let outcome = simulate(&plan, &cluster, &Options { network, ..Options::default() });
            let outcome = outcome.unwrap_or_else(|error| panic!("{error}\n{file}"));
            assert!(outcome.iteration.0 > 0.0);
            let unequal = ["straggler", "[[device]]\nhosts", "[[link]]"];
            if unequal.iter().any(|entry| file.contains(entry)) {
                assert!(!outcome.rank_groups.is_empty(), "{network}\n{file}");
            }
        }
    }
}

/// Checks the page's arithmetic: bandwidth of one device in the TCP example.
#[test]
fn the_page_computes_what_the_simulator_does() {
    let file = files().into_iter().find(|file| file.contains("pcie-hosts")).unwrap();
    let cluster = Cluster::parse(&file, "docs/clusters.md").unwrap();
    let path = cluster.link(paceline_plan::ids::Rank(0), paceline_plan::ids::Rank(8)).unwrap();
    let rate = path.bandwidth.0 / path.sharing;
    assert!((rate / 2.625e9 - 1.0).abs() < 1e-12, "{rate}");
    assert!(PAGE.contains("= 2.63 GB/s a device"));
}
