//! Tables for a terminal.

use super::numbers::{Scale, percent};
use super::rows::{PARTS, Row, rows};
use paceline_plan::trace::{Trace, Window};
use paceline_plan::units::Seconds;

/// Number of ranks shown before the middle ones are left out.
const RANKS: usize = 16;

/// Compute, communication, exposed communication and bubble of each rank in the steady iteration,
/// predicted next to measured, in lines that fit a terminal of 80 columns. Empty without a trace.
pub(crate) fn breakdown_table(simulated: Option<&Trace>, measured: Option<&Trace>) -> String {
    let length =
        |trace: Option<&Trace>| trace.and_then(Trace::steady_window).as_ref().map(Window::length);
    let (predicted, seen) = (length(simulated), length(measured));
    let Some(longest) = [predicted, seen].into_iter().flatten().reduce(Seconds::max) else {
        return String::new();
    };
    let scale = Scale::of(longest);
    // Of two values, keeps those whose trace is present.
    let present = |[p, m]: [String; 2]| -> Vec<String> {
        let sides = [predicted.map(|_| p), seen.map(|_| m)];
        sides.into_iter().flatten().collect()
    };

    let mut table = Table::default();
    let mut titles = vec![Cell::titles(vec![scale.unit.to_owned()])];
    titles.extend(PARTS.iter().map(|part| Cell::titles(vec![part.title.to_owned()])));
    let mut heads = vec![Cell::numbers(vec!["rank".to_owned()])];
    let names = ["pred.", "meas."].map(str::to_owned);
    heads.extend(PARTS.iter().map(|_| Cell::numbers(present(names.clone()))));
    table.rows.extend([titles, heads]);
    table.rule();
    for row in rows(simulated, measured, RANKS) {
        let (label, pair) = match row {
            Row::Rank(rank, pair) => (rank.to_string(), pair),
            Row::Mean(pair) => {
                table.rule();
                ("mean".to_owned(), pair)
            }
            Row::Elided(count) => {
                table.note(format!("… {count} more ranks"));
                continue;
            }
        };
        let mut cells = vec![Cell::numbers(vec![label])];
        cells.extend(PARTS.iter().map(|part| {
            let (predicted, seen) = pair.part(part);
            let show = |time: Option<Seconds>| time.map_or("–".to_owned(), |t| scale.show(t));
            Cell::numbers(present([show(predicted), show(seen)]))
        }));
        table.rows.push(cells);
    }
    format!("{}{}\n", table.draw(), closing(predicted, seen, &scale))
}

/// The whole iteration, as a sentence.
fn closing(predicted: Option<Seconds>, seen: Option<Seconds>, scale: &Scale) -> String {
    match (predicted, seen) {
        (Some(p), Some(m)) => {
            let error = (m.0 > 0.0).then(|| (p - m).0 / m.0);
            format!(
                "The traced iteration: {} predicted, {} measured ({}).",
                scale.full(p),
                scale.full(m),
                percent(error)
            )
        }
        (Some(p), None) => format!("The iteration: {} predicted.", scale.full(p)),
        (None, Some(m)) => format!("The traced iteration: {} measured.", scale.full(m)),
        (None, None) => String::new(),
    }
}

/// Rows of cells, drawn with light box lines.
#[derive(Default)]
struct Table {
    /// A row without cells is a rule.
    rows: Vec<Vec<Cell>>,
    /// Lines of text that span the table, each before the row with that index.
    notes: Vec<(usize, String)>,
}

/// Text between two vertical lines: one centred title, or right-aligned numbers.
struct Cell {
    texts: Vec<String>,
    centred: bool,
}

impl Cell {
    fn titles(texts: Vec<String>) -> Self {
        Self { texts, centred: true }
    }

    fn numbers(texts: Vec<String>) -> Self {
        Self { texts, centred: false }
    }
}

/// Columns between two numbers of one cell.
const GAP: usize = 2;

impl Table {
    fn rule(&mut self) {
        self.rows.push(Vec::new());
    }

    fn note(&mut self, text: String) {
        self.notes.push((self.rows.len(), text));
    }

    fn draw(&self) -> String {
        let widths = self.widths();
        let inner = |column: &Vec<usize>| column.iter().sum::<usize>() + GAP * (column.len() - 1);
        let line = |left: &str, middle: &str, right: &str| {
            let bars: Vec<String> = widths.iter().map(|w| "─".repeat(inner(w) + 2)).collect();
            format!("{left}{}{right}\n", bars.join(middle))
        };
        let mut out = line("┌", "┬", "┐");
        for (number, row) in self.rows.iter().enumerate() {
            for (_, note) in self.notes.iter().filter(|(at, _)| *at == number) {
                let rest: usize = widths[1..].iter().map(|w| inner(w) + 3).sum::<usize>() - 3;
                out += &format!("│ {:>1$} │ {note:<rest$} │\n", "", inner(&widths[0]));
            }
            if row.is_empty() {
                out += &line("├", "┼", "┤");
                continue;
            }
            let cells: Vec<String> =
                row.iter().zip(&widths).map(|(cell, w)| cell.draw(w, inner(w))).collect();
            out += &format!("│ {} │\n", cells.join(" │ "));
        }
        out + &line("└", "┴", "┘")
    }

    /// The width of every number of every cell, sufficient for the cell's title too.
    fn widths(&self) -> Vec<Vec<usize>> {
        let mut widths: Vec<Vec<usize>> = Vec::new();
        for (column, cell) in self.rows.iter().flat_map(|row| row.iter().enumerate()) {
            if widths.len() <= column {
                widths.push(vec![0]);
            }
            let slots = &mut widths[column];
            if cell.centred {
                continue;
            }
            slots.resize(slots.len().max(cell.texts.len()), 0);
            for (slot, text) in slots.iter_mut().zip(&cell.texts) {
                *slot = (*slot).max(text.chars().count());
            }
        }
        for (column, cell) in self.rows.iter().flat_map(|row| row.iter().enumerate()) {
            let slots = &mut widths[column];
            let (wide, count) = (slots.iter().sum::<usize>(), slots.len());
            let title = cell.texts.iter().map(|t| t.chars().count()).sum::<usize>();
            if cell.centred && title > wide + GAP * (count - 1) {
                // Distributed so that the numbers below a long title stay evenly spaced.
                let missing = title - wide - GAP * (count - 1);
                slots.iter_mut().for_each(|slot| *slot += missing.div_ceil(count));
            }
        }
        widths
    }
}

impl Cell {
    fn draw(&self, widths: &[usize], inner: usize) -> String {
        if self.centred {
            return format!("{:^inner$}", self.texts.concat());
        }
        let padded = self.texts.iter().zip(widths).map(|(text, &w)| format!("{text:>w$}"));
        padded.collect::<Vec<_>>().join(&" ".repeat(GAP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::small;
    use paceline_plan::trace::{Origin, TraceBuilder};

    fn assert_rectangle(table: &str) {
        let lines: Vec<&str> =
            table.lines().filter(|l| l.starts_with(['┌', '│', '├', '└'])).collect();
        let width = lines[0].chars().count();
        assert!(width <= 80, "{width} columns\n{table}");
        assert!(lines.iter().all(|l| l.chars().count() == width), "{table}");
    }

    #[test]
    fn predicted_stands_beside_measured() {
        let simulated = small(Origin::Simulated, 2, 0.4e-3);
        let measured = small(Origin::Measured, 2, 0.6e-3);
        let table = breakdown_table(Some(&simulated), Some(&measured));
        assert_rectangle(&table);
        let expected = "\
┌──────┬──────────────┬────────────────┬──────────────┬──────────────┐
│  ms  │   compute    │ communication  │   exposed    │    bubble    │
│ rank │ pred.  meas. │  pred.   meas. │ pred.  meas. │ pred.  meas. │
├──────┼──────────────┼────────────────┼──────────────┼──────────────┤
│    0 │ 0.400  0.600 │  0.400   0.400 │ 0.400  0.300 │ 0.200  0.100 │
";
        assert_eq!(table.lines().take(5).map(|l| format!("{l}\n")).collect::<String>(), expected);
        assert!(
            table.ends_with(
                "The traced iteration: 1.000 ms predicted, 1.000 ms measured (0.0 %).\n"
            )
        );
    }

    #[test]
    fn one_trace_or_none_is_enough() {
        let measured = small(Origin::Measured, 40, 0.6e-3);
        let table = breakdown_table(None, Some(&measured));
        assert_rectangle(&table);
        assert!(table.contains("… 24 more ranks") && !table.contains("pred."), "{table}");
        assert_eq!(table.lines().count(), 4 + 17 + 2 + 2);
        assert_eq!(breakdown_table(None, None), "");
        let empty = TraceBuilder::new(Origin::Simulated, "", 0).finish();
        assert_eq!(breakdown_table(Some(&empty), None), "");
    }
}
