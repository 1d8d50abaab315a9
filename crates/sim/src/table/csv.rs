//! Parser for comma-separated values with quotes (RFC 4180).

use super::TableError;
use std::collections::BTreeMap;

/// Table line by column; empty columns are omitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// First line in the file, counted from 1.
    pub(super) line: usize,
    fields: BTreeMap<String, String>,
}

impl Record {
    /// Trimmed text of a column; `None` if it is empty or missing.
    pub(super) fn get(&self, column: &str) -> Option<&str> {
        self.fields.get(column).map(String::as_str)
    }
}

/// Parses a table whose first line must name at least the `required` columns.
pub(super) fn parse(text: &str, file: &str, required: &[&str]) -> Result<Vec<Record>, TableError> {
    let located = |line, problem: String, remedy: &str| TableError {
        file: file.to_owned(),
        line,
        problem,
        remedy: remedy.to_owned(),
    };
    let mut lines = split(text)
        .map_err(|line| located(line, "a quoted field does not end".into(), "close it with \""))?;
    // An empty line parses as one empty field.
    lines.retain(|(_, fields)| fields.len() > 1 || fields.iter().any(|field| !field.is_empty()));
    let mut lines = lines.into_iter();
    let Some((line, header)) = lines.next() else {
        return Err(located(1, "the table is empty".into(), "its first line names the columns"));
    };
    let header: Vec<String> = header.iter().map(|name| name.trim().to_owned()).collect();
    let missing: Vec<&str> =
        required.iter().copied().filter(|&name| !header.iter().any(|h| h == name)).collect();
    if !missing.is_empty() {
        let problem = format!("there is no column {}", missing.join(", "));
        return Err(located(line, problem, "the first line names the columns"));
    }
    lines
        .map(|(line, fields)| {
            if fields.len() != header.len() {
                let (found, columns) = (fields.len(), header.len());
                let problem = format!("{found} fields in a table of {columns} columns");
                return Err(located(line, problem, "quote fields that contain a comma"));
            }
            let named = header.iter().cloned().zip(fields.iter().map(|f| f.trim().to_owned()));
            Ok(Record { line, fields: named.filter(|(_, field)| !field.is_empty()).collect() })
        })
        .collect()
}

/// Splits text into lines of fields; an error is the line of an unclosed quote.
fn split(text: &str) -> Result<Vec<(usize, Vec<String>)>, usize> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let (mut lines, mut fields, mut field) = (Vec::new(), Vec::new(), String::new());
    let (mut line, mut first_line) = (1, 1);
    // Line of the currently open quote.
    let mut quoted: Option<usize> = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        line += usize::from(c == '\n');
        match (c, quoted) {
            ('"', Some(_)) if chars.next_if_eq(&'"').is_some() => field.push('"'),
            ('"', Some(_)) => quoted = None,
            ('"', None) if field.is_empty() => quoted = Some(line),
            (_, Some(_)) => field.push(c),
            (',', None) => fields.push(std::mem::take(&mut field)),
            ('\n', None) => {
                fields.push(std::mem::take(&mut field));
                lines.push((first_line, std::mem::take(&mut fields)));
                first_line = line;
            }
            ('\r', None) if chars.peek() == Some(&'\n') => {}
            (_, None) => field.push(c),
        }
    }
    if let Some(opened) = quoted {
        return Err(opened);
    }
    if !field.is_empty() || !fields.is_empty() {
        fields.push(field);
        lines.push((first_line, fields));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn column(text: &str, column: &str) -> Vec<Option<String>> {
        let records = parse(text, "t.csv", &[]).unwrap();
        records.iter().map(|r| r.get(column).map(str::to_owned)).collect()
    }

    #[test]
    fn quotes_hold_commas_lines_and_quotes() {
        let text = "id,note\r\na,\"one, two\"\r\nb,\"she said \"\"so\"\"\nand left\"\nc,\n";
        let notes = column(text, "note");
        let expected = [Some("one, two"), Some("she said \"so\"\nand left"), None];
        assert_eq!(notes, expected.map(|n| n.map(str::to_owned)));
        let lines: Vec<usize> =
            parse(text, "t.csv", &[]).unwrap().iter().map(|record| record.line).collect();
        assert_eq!(lines, [2, 3, 5]);
    }

    #[test]
    fn the_last_line_need_not_end_and_empty_ones_do_not_count() {
        assert_eq!(column("id\n\nx\n\ny", "id"), ["x", "y"].map(|n| Some(n.to_owned())));
    }

    #[test]
    fn what_is_no_table_is_told_where() {
        let told = |text: &str| parse(text, "t.csv", &["id", "gpus"]).unwrap_err().to_string();
        assert_eq!(told(""), "t.csv:1: the table is empty; its first line names the columns");
        assert_eq!(
            told("id,x\n1,2\n"),
            "t.csv:1: there is no column gpus; the first line names the columns"
        );
        assert_eq!(
            told("id,gpus\n1,2\n1,2,3\n"),
            "t.csv:3: 3 fields in a table of 2 columns; quote fields that contain a comma"
        );
        assert_eq!(
            told("id,gpus\n1,\"2\n3,4\n"),
            "t.csv:2: a quoted field does not end; close it with \""
        );
    }

    proptest! {
        #[test]
        fn any_field_comes_back(fields in prop::collection::vec("[a-z,\"\n;é]{0,6}", 1..6)) {
            let quote = |f: &String| format!("\"{}\"", f.replace('"', "\"\""));
            let text = fields.iter().map(quote).collect::<Vec<_>>().join(",") + "\n";
            let lines = split(&text).unwrap();
            prop_assert_eq!(lines, vec![(1, fields)]);
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,60}") {
            let _ = parse(&text, "t.csv", &["id"]);
        }
    }
}
