//! A study as a table for the terminal.

use super::flags::Study;
use super::{Point, Setting};
use crate::overview::table;

/// Formats a study. With one axis: one row per value and one column per field. With two: one table
/// per field, with the second axis as columns.
pub(super) fn text(study: &Study, points: &[Point]) -> String {
    let [rows, across] = &study.axes[..] else {
        let head: Vec<&str> = std::iter::once(study.axes[0].title())
            .chain(study.fields.iter().map(|f| f.name.as_str()))
            .collect();
        let rows = points.iter().map(|point| {
            let cells = study.fields.iter().map(|field| cell(point, field));
            std::iter::once(point.settings[0].label.clone()).chain(cells).collect()
        });
        return table(&head, 1, rows);
    };
    let tables = study.drawn().iter().map(|field| {
        let columns = across.settings.iter().map(|setting| setting.label.as_str());
        let corner = format!("{} \\ {}", rows.title(), across.title());
        let head: Vec<&str> = std::iter::once(corner.as_str()).chain(columns).collect();
        let lines = rows.settings.iter().map(|row| {
            let at = |column: &Setting| {
                let here = |point: &&Point| point.settings == [row.clone(), column.clone()];
                points.iter().find(here).map_or_else(String::new, |point| cell(point, field))
            };
            std::iter::once(row.label.clone()).chain(across.settings.iter().map(at)).collect()
        });
        format!("{}\n{}", field.name, table(&head, 1, lines))
    });
    tables.collect::<Vec<_>>().join("\n")
}

fn cell(point: &Point, field: &super::field::Field) -> String {
    match &point.result {
        Ok(result) => field.value(result).map_or_else(|_| "–".to_owned(), |v| field.unit.show(v)),
        Err(_) => "–".to_owned(),
    }
}
