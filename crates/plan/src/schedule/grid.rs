//! A schedule as a table of time slots: one row per pipeline rank, one cell per slot, blank if the
//! rank is idle.
//!
//! [`unit_grid`] has the slots of textbooks. Those of [`grid`] are those of PyTorch's `pipeline_order`, the common form for comparing schedules. They
//! are a drawing, not a prediction: PyTorch reserves fixed space for backwards whatever they cost,
//! and rows end at their last action. With a split backward, every pass takes one slot and starts
//! as early as possible, as in the papers; PyTorch's tables leave no space there for gradients in
//! transit. For time, see [`bubble`](super::bubble).

use super::dry_run::ends;
use super::{Action, ActionParseError, Row, ScheduleError, ScheduleKind, order, rows};
use thiserror::Error;

/// Maximum number of cells of a grid: twice the actions, plus space for the idle slots of a deep
/// pipeline.
const MAX_CELLS: u64 = 1 << 26;

/// Builds the schedule's table: per pipeline rank, an action or an idle slot in each cell.
pub fn grid(
    kind: ScheduleKind,
    pipeline_ranks: u16,
    microbatches: u32,
) -> Result<Vec<Vec<Option<Action>>>, ScheduleError> {
    check_size(kind, pipeline_ranks, microbatches)?;
    if !kind.flushes() || kind.splits_backward() {
        return unit_grid(kind, pipeline_ranks, microbatches);
    }
    rows(kind, pipeline_ranks, microbatches)
}

/// Builds the schedule's table as textbooks draw it: every pass takes one slot and starts as early
/// as it can, so the forwards of the warm-up stand at the front.
pub fn unit_grid(
    kind: ScheduleKind,
    pipeline_ranks: u16,
    microbatches: u32,
) -> Result<Vec<Vec<Option<Action>>>, ScheduleError> {
    check_size(kind, pipeline_ranks, microbatches)?;
    let own = order(kind, pipeline_ranks, microbatches)?;
    if kind.flushes() {
        return Ok(one_slot_each(own));
    }
    // Several iterations from the start of a run: fills as 1F1B does and never drains.
    let shown = microbatches.max(2 * u32::from(pipeline_ranks));
    Ok(one_slot_each(order(ScheduleKind::OneFOneB, pipeline_ranks, shown)?))
}

/// Refuses a grid with too many cells.
fn check_size(
    kind: ScheduleKind,
    pipeline_ranks: u16,
    microbatches: u32,
) -> Result<(), ScheduleError> {
    // Every schedule idles at most one slot per action plus, while it fills, four slots per stage
    // and rank.
    let stages = u64::from(pipeline_ranks) * u64::from(kind.chunks());
    let actions = stages.saturating_mul(u64::from(microbatches) * kind.passes().len() as u64);
    let cells = actions
        .saturating_mul(2)
        .saturating_add(stages.saturating_mul(4 * u64::from(pipeline_ranks)));
    if cells > MAX_CELLS {
        return Err(ScheduleError::TooLarge { what: "cells", count: cells, limit: MAX_CELLS });
    }
    Ok(())
}

/// Gives every pass one slot, as early as it can run. Orders built here can always run.
fn one_slot_each(order: Vec<Vec<Action>>) -> Vec<Vec<Option<Action>>> {
    let ends = ends(&order, |_| 1).unwrap_or_default();
    order
        .iter()
        .zip(ends)
        .map(|(row, ends)| {
            let mut cells = Vec::new();
            for (&action, end) in row.iter().zip(ends) {
                cells.resize(end as usize - 1, None);
                cells.push(Some(action));
            }
            cells
        })
        .collect()
}

/// Formats the grid as comma-separated text, one line per rank; PyTorch's `_dump_csv` writes the
/// same cells.
pub fn to_csv(grid: &[Vec<Option<Action>>]) -> String {
    let mut text = String::new();
    for row in grid {
        for (cell, action) in row.iter().enumerate() {
            if cell > 0 {
                text.push(',');
            }
            if let Some(action) = action {
                text.push_str(&action.to_string());
            }
        }
        if row.as_slice() == [None] {
            // A line with one blank cell would read as a line without cells.
            text.push_str("\"\"");
        }
        text.push('\n');
    }
    text
}

/// Formats the grid for people: a line of slot numbers, one line per rank, `·` in idle slots. With
/// one stage per rank a cell is the pass and its microbatch (`F3`), else the stage stands before it
/// (`2F3`).
pub fn to_text(grid: &[Vec<Option<Action>>]) -> String {
    let one_stage = grid
        .iter()
        .enumerate()
        .all(|(rank, row)| row.iter().flatten().all(|action| usize::from(action.stage.0) == rank));
    let cell = |action: &Option<Action>| match action {
        None => "·".to_owned(),
        Some(action) if one_stage => format!("{}{}", action.pass, action.microbatch),
        Some(action) => action.to_string(),
    };
    let columns = grid.iter().map(Vec::len).max().unwrap_or(0);
    let mut lines: Vec<Vec<String>> = vec![(1..=columns).map(|slot| slot.to_string()).collect()];
    for row in grid {
        let mut cells: Vec<String> = row.iter().map(cell).collect();
        cells.resize(columns, "·".to_owned());
        lines.push(cells);
    }
    let width = lines.iter().flatten().map(|cell| cell.chars().count()).max().unwrap_or(0);
    let names = format!("rank {}", grid.len().saturating_sub(1)).len();
    let mut text = String::new();
    for (line, cells) in lines.iter().enumerate() {
        let name = line.checked_sub(1).map_or("slot".to_owned(), |rank| format!("rank {rank}"));
        text += &format!("{name:<names$}");
        text.extend(cells.iter().map(|cell| format!(" {cell:>width$}")));
        text.push('\n');
    }
    text
}

/// Parses the output of [`to_csv`], or of PyTorch's `_dump_csv` for a schedule of compute actions.
pub fn parse_csv(text: &str) -> Result<Vec<Vec<Option<Action>>>, CsvError> {
    let line = |(line, row): (usize, &str)| {
        if row.trim().is_empty() {
            return Ok(Vec::new());
        }
        let cell = |(cell, token): (usize, &str)| match token.trim() {
            "" | "\"\"" => Ok(None),
            token => token.parse().map(Some).map_err(|source| CsvError {
                line: line + 1,
                cell: cell + 1,
                source,
            }),
        };
        row.split(',').enumerate().map(cell).collect()
    };
    text.lines().enumerate().map(line).collect()
}

/// Error for a cell that is not an action.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}, cell {cell}: {source}")]
pub struct CsvError {
    /// Line number, counted from 1.
    pub line: usize,
    /// Cell number in the line, counted from 1.
    pub cell: usize,
    /// The parse error.
    pub source: ActionParseError,
}

impl Row for Vec<Option<Action>> {
    fn run(&mut self, action: Action) {
        self.push(Some(action));
    }

    fn idle(&mut self, slots: u64) {
        self.extend((0..slots).map(|_| None));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Microbatch, Stage};
    use crate::schedule::{Pass, order};
    use proptest::prelude::*;

    #[test]
    fn a_grid_prints_as_a_table() {
        let grid = grid(ScheduleKind::GPipe, 2, 2).unwrap();
        assert_eq!(to_csv(&grid), "0F0,0F1,,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n");
    }

    /// Narayanan et al. (arXiv 2104.04473), figure 3 with four stages: 2 · (8 + 4 − 1) slots.
    #[test]
    fn textbook_grids_take_one_slot_a_pass_and_start_with_the_warm_up() {
        let textbook = unit_grid(ScheduleKind::OneFOneB, 4, 8).unwrap();
        let columns = textbook.iter().map(Vec::len).max();
        assert_eq!(columns, Some(22));
        for (rank, row) in textbook.iter().enumerate() {
            let warm_up = row[rank..].iter().take(4 - rank);
            assert!(warm_up.flatten().all(|action| action.pass == Pass::Forward), "{rank}");
            assert_eq!(row[rank..4].iter().flatten().count(), 4 - rank, "no gap before slot 4");
        }
        let text = to_text(&unit_grid(ScheduleKind::GPipe, 2, 2).unwrap());
        assert_eq!(
            text,
            "slot    1  2  3  4  5  6\nrank 0 F0 F1  ·  · B0 B1\nrank 1  · F0 F1 B0 B1  ·\n"
        );
        let chunks = unit_grid(ScheduleKind::Interleaved { chunks: 2 }, 2, 2).unwrap();
        assert!(to_text(&chunks).contains(" 2F0"), "{}", to_text(&chunks));
    }

    #[test]
    fn a_bad_cell_is_located() {
        let error = parse_csv("0F0,,0B0\n,1F0,1Q0\n").unwrap_err();
        assert!(error.to_string().starts_with("line 2, cell 3: '1Q0' is not an action"), "{error}");
    }

    #[test]
    fn line_ends_of_either_kind_and_blanks_are_read() {
        let expected = parse_csv("0F0,,0B0\n,1F0\n").unwrap();
        assert_eq!(parse_csv("0F0, ,0B0\r\n,1F0").unwrap(), expected);
    }

    #[test]
    fn a_pipeline_too_deep_to_draw_is_refused() {
        assert!(order(ScheduleKind::GPipe, u16::MAX, 1).is_ok());
        let error = grid(ScheduleKind::GPipe, u16::MAX, 1).unwrap_err();
        assert!(matches!(error, ScheduleError::TooLarge { what: "cells", .. }));
        let all = ScheduleKind::Interleaved { chunks: u16::MAX };
        assert!(grid(all, u16::MAX, u32::MAX).is_err());
        assert!(grid(ScheduleKind::Interleaved { chunks: 0 }, 2, 2).is_err());
    }

    proptest! {
        /// A grid adds only idle slots to the order, and the bound on cells holds.
        #[test]
        fn a_grid_is_an_order_with_gaps(
            chunks in 0u16..4, ranks in 1u16..9, microbatches in 1u32..20,
        ) {
            let kind = match chunks {
                0 => ScheduleKind::OneFOneB,
                chunks => ScheduleKind::Interleaved { chunks },
            };
            let split = ScheduleKind::ZbH1 { chunks: chunks.max(1) };
            for kind in [ScheduleKind::GPipe, kind, split, ScheduleKind::DualPipeV] {
                let Ok(grid) = grid(kind, ranks, microbatches) else { continue };
                let actions: Vec<Vec<_>> =
                    grid.iter().map(|row| row.iter().flatten().copied().collect()).collect();
                let order = order(kind, ranks, microbatches).unwrap();
                let cells: usize = grid.iter().map(Vec::len).sum();
                let busy: usize = order.iter().map(Vec::len).sum();
                let stages = usize::from(ranks) * usize::from(kind.chunks());
                prop_assert!(cells <= 2 * busy + 4 * stages * usize::from(ranks));
                prop_assert_eq!(actions, order);
            }
        }

        #[test]
        fn text_round_trips(cells in prop::collection::vec(
            prop::collection::vec(prop::option::of((0u16..9, 0u32..9)), 0..6), 0..4)) {
            let action = |(stage, microbatch)| Action {
                stage: Stage(stage), pass: Pass::BackwardWeight, microbatch: Microbatch(microbatch),
            };
            let grid: Vec<Vec<_>> = cells
                .into_iter()
                .map(|row| row.into_iter().map(|cell| cell.map(action)).collect())
                .collect();
            prop_assert_eq!(parse_csv(&to_csv(&grid)), Ok(grid));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC*") {
            let _ = parse_csv(&text);
        }
    }
}
