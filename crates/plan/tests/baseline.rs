//! Text hashes of the plans of 500 seeded strategies: a change of structure leaves them as they are.
//!
//! After a deliberate change, run `UPDATE_GOLDEN=1 cargo test -p paceline-plan --test baseline`.

mod seeded;

use paceline_plan::text;
use std::fmt::Write;

#[test]
#[allow(clippy::disallowed_methods)]
fn plans_of_seeded_strategies_are_what_they_were() {
    let mut found = String::new();
    seeded::plans(500, |seed, plan| {
        let printed = text::print(plan);
        writeln!(found, "{seed} {:016x} {}", seeded::hash(&printed), printed.len()).unwrap();
    });
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/strategies.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    let changed: Vec<_> = golden.lines().zip(found.lines()).filter(|(a, b)| a != b).collect();
    assert!(golden == found, "{} of 500 plans differ, first {:?}", changed.len(), changed.first());
}
