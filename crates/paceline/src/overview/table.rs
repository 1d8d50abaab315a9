//! Plain tables and numbers for a terminal.

/// Formats a number with thousands separators.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A share as a percentage.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Aligns columns under their headings; the first `texts` columns are text, the others numbers.
pub(crate) fn table(
    head: &[&str],
    texts: usize,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let head = head.iter().map(|title| (*title).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            // Not by a format's width, which ends at 65,535.
            let blank = " ".repeat(width - cell.chars().count());
            if column < texts { cell.clone() + &blank } else { blank + cell }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Truncates a text to `width` columns, and marks the omission.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_apart() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(count(u64::MAX), "18,446,744,073,709,551,615");
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["a".to_owned(), "1".to_owned()], vec!["bb".to_owned(), "22".to_owned()]];
        assert_eq!(table(&["x", "n"], 1, rows), "x    n\na    1\nbb  22\n");
    }

    #[test]
    fn long_texts_are_cut() {
        assert_eq!(cut("äbcdef", 4), "äbc…");
        assert_eq!(cut("äbcd", 4), "äbcd");
    }
}
