//! Comparison of two pictures.

/// The first visible difference: other text, or a number that differs by more than a thirtieth and
/// by more than three units.
pub(crate) fn difference(committed: &str, drawn: &str) -> Option<String> {
    let (old, new) = (pieces(committed), pieces(drawn));
    for (old, new) in old.iter().zip(&new) {
        let same = match (old.parse::<f64>(), new.parse::<f64>()) {
            (Ok(a), Ok(b)) => (a - b).abs() <= 3.0_f64.max(a.abs() / 30.0),
            _ => old == new,
        };
        if !same {
            return Some(format!("it has '{}' where there is '{}' now", old.trim(), new.trim()));
        }
    }
    (old.len() != new.len()).then(|| "it has more or fewer marks".to_owned())
}

/// Splits a text into numbers and the text between them.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let digit = |c: char| c.is_ascii_digit() || c == '.';
        let number = rest.starts_with(digit);
        let end = rest.find(|c: char| digit(c) != number).unwrap_or(rest.len());
        pieces.push(&rest[..end]);
        rest = &rest[end..];
    }
    pieces
}

#[test]
fn small_changes_pass_and_large_ones_do_not() {
    let old = "<circle cx=\"100.0\" cy=\"50\"/>";
    assert_eq!(difference(old, old), None);
    assert_eq!(difference(old, &old.replace("100.0", "102.5")), None);
    assert!(difference(old, &old.replace("100.0", "110.0")).is_some());
    assert!(difference(old, &old.replace("circle", "square")).is_some());
    assert!(difference(old, &format!("{old}{old}")).is_some());
    assert!(difference("", old).is_some());
}
