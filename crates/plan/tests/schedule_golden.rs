//! Compares schedules with PyTorch's, cell by cell. `golden/schedules/README.md` explains how the
//! PyTorch side was generated.

use paceline_plan::schedule::grid::{grid, parse_csv, to_csv};
use paceline_plan::schedule::{Action, Pass, ScheduleError, ScheduleKind, order};

const SINGLE_STAGE_TABLES: &str = include_str!("golden/schedules/single_stage_tables.csv");
const SINGLE_STAGE_RUNS: &str = include_str!("golden/schedules/single_stage_runs.csv");
const INTERLEAVED_TABLES: &str = include_str!("golden/schedules/interleaved_tables.csv");
const SPLIT_ORDERS: &str = include_str!("golden/schedules/split_orders.csv");
const INTERLEAVED_REFUSED: &str = include_str!("golden/schedules/interleaved_refused.csv");

struct Case {
    name: String,
    kind: ScheduleKind,
    ranks: u16,
    microbatches: u32,
    csv: String,
}

/// Parses cases; each follows a line `# kind ranks microbatches`.
fn cases(text: &str) -> Vec<Case> {
    let case = |section: &str| {
        let (name, csv) = section.split_once('\n').expect("a case has rows");
        let [kind, ranks, microbatches] = name.split(' ').collect::<Vec<_>>()[..] else {
            panic!("'{name}' does not name a case");
        };
        Case {
            name: name.to_owned(),
            kind: kind.parse().expect("a schedule"),
            ranks: ranks.parse().expect("a number of ranks"),
            microbatches: microbatches.parse().expect("a number of microbatches"),
            csv: csv.to_owned(),
        }
    };
    text.split("# ").skip(1).map(case).collect()
}

#[test]
fn gpipe_and_interleaved_grids_are_pytorchs() {
    let mut compared = 0;
    for text in [SINGLE_STAGE_TABLES, INTERLEAVED_TABLES] {
        for case in cases(text).iter().filter(|case| case.kind != ScheduleKind::OneFOneB) {
            let ours = grid(case.kind, case.ranks, case.microbatches).unwrap();
            assert_eq!(to_csv(&ours), case.csv, "{}", case.name);
            assert_eq!(parse_csv(&case.csv).unwrap(), ours, "{}", case.name);
            compared += 1;
        }
    }
    assert_eq!(compared, 12 + 60);
}

/// PyTorch's 1F1B table numbers the forwards of the last rank 1, 2, …, m, while its runtime,
/// compared below, runs 0, 1, …, m − 1. Everything else is equal, including idle cells.
#[test]
fn one_f_one_b_grids_are_pytorchs_but_for_the_numbers_on_its_last_rank() {
    let mut compared = 0;
    for case in cases(SINGLE_STAGE_TABLES) {
        if case.kind != ScheduleKind::OneFOneB {
            continue;
        }
        let theirs = parse_csv(&case.csv).unwrap();
        let mut ours = grid(case.kind, case.ranks, case.microbatches).unwrap();
        for action in ours.last_mut().into_iter().flatten().flatten() {
            action.microbatch.0 += u32::from(action.pass == Pass::Forward);
        }
        assert_eq!(ours, theirs, "{}", case.name);
        compared += 1;
    }
    assert_eq!(compared, 12);
}

#[test]
fn orders_are_what_pytorchs_runtime_executes() {
    let (whole, split) = (cases(SINGLE_STAGE_RUNS), cases(SPLIT_ORDERS));
    assert_eq!((whole.len(), split.len()), (24, 36 + 12));
    for case in whole.into_iter().chain(split) {
        let ours = order(case.kind, case.ranks, case.microbatches).unwrap();
        let ours: Vec<Vec<Option<Action>>> =
            ours.into_iter().map(|row| row.into_iter().map(Some).collect()).collect();
        assert_eq!(to_csv(&ours), case.csv, "{}", case.name);
    }
}

#[test]
fn the_same_microbatch_counts_are_refused() {
    for line in INTERLEAVED_REFUSED.lines() {
        let numbers: Vec<u32> = line.split(',').map(|number| number.parse().unwrap()).collect();
        let (ranks, theirs) = (numbers[0] as u16, &numbers[1..]);
        let kind = ScheduleKind::Interleaved { chunks: 2 };
        let ours: Vec<u32> =
            (1..=64).filter(|&microbatches| order(kind, ranks, microbatches).is_err()).collect();
        assert_eq!(ours, theirs, "{ranks} ranks");
        for &microbatches in theirs {
            let Err(ScheduleError::Rounds { below, above, .. }) = order(kind, ranks, microbatches)
            else {
                panic!("{ranks} ranks, {microbatches} microbatches: refused for another reason");
            };
            let above = above.expect("a larger count exists");
            assert!(below < microbatches && microbatches < above);
            for nearer in below + 1..above {
                assert!(order(kind, ranks, nearer).is_err(), "{nearer} is nearer");
            }
            assert!(order(kind, ranks, below).is_ok() && order(kind, ranks, above).is_ok());
        }
    }
}
