//! Arithmetic over named numbers: `ops.all_gather tp.time_s / ops.all_gather tp.count`.
//!
//! Names may contain dots, inner spaces and a selection in brackets; a name that contains an
//! operator must be quoted. `*` and `/` bind tighter than `+` and `-`; operators of equal
//! precedence are left-associative.

use std::fmt;

/// An expression of numbers, names and operators.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expression {
    /// A literal number.
    Number(f64),
    /// The value of a name.
    Name(String),
    /// Two operands and their operator.
    Of(Box<Expression>, Operator, Box<Expression>),
}

/// A binary operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    /// Addition.
    Plus,
    /// Subtraction.
    Minus,
    /// Multiplication.
    Times,
    /// Division.
    Over,
}

impl Expression {
    /// Parses an expression; the error describes the problem.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let tokens = tokens(text)?;
        let mut reader = Reader { tokens: &tokens, at: 0 };
        let expression = reader.sum(0)?;
        match reader.next() {
            None => Ok(expression),
            Some(left) => Err(format!("'{text}' has unexpected '{left}' at its end")),
        }
    }

    /// Evaluates the expression; the error is the first name without a value.
    pub(crate) fn value<'e>(&'e self, of: &dyn Fn(&str) -> Option<f64>) -> Result<f64, &'e str> {
        Ok(match self {
            Self::Number(number) => *number,
            Self::Name(name) => of(name).ok_or(name.as_str())?,
            Self::Of(left, operator, right) => {
                let (left, right) = (left.value(of)?, right.value(of)?);
                match operator {
                    Operator::Plus => left + right,
                    Operator::Minus => left - right,
                    Operator::Times => left * right,
                    Operator::Over => left / right,
                }
            }
        })
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Number(f64),
    Name(String),
    Operator(Operator),
    Open,
    Close,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => f.write_str(name),
            Self::Operator(Operator::Plus) => f.write_str("+"),
            Self::Operator(Operator::Minus) => f.write_str("-"),
            Self::Operator(Operator::Times) => f.write_str("*"),
            Self::Operator(Operator::Over) => f.write_str("/"),
            Self::Open => f.write_str("("),
            Self::Close => f.write_str(")"),
        }
    }
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let (token, length) = match first {
            '+' => (Token::Operator(Operator::Plus), 1),
            '-' => (Token::Operator(Operator::Minus), 1),
            '*' => (Token::Operator(Operator::Times), 1),
            '/' => (Token::Operator(Operator::Over), 1),
            '(' => (Token::Open, 1),
            ')' => (Token::Close, 1),
            _ => word(rest)?,
        };
        tokens.push(token);
        rest = rest[length..].trim_start();
    }
    Ok(tokens)
}

/// Reads a number or a name; returns it with its length in bytes.
fn word(text: &str) -> Result<(Token, usize), String> {
    let (mut quoted, mut depth) = (false, 0_usize);
    let end = text.find(|c: char| {
        match c {
            '"' => quoted = !quoted,
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => return !quoted && depth == 0 && "+-*/()".contains(c),
        }
        false
    });
    if quoted || depth > 0 {
        return Err(format!("'{text}' ends within quotes or brackets"));
    }
    let end = end.unwrap_or(text.len());
    let word = text[..end].trim();
    if let Ok(number) = word.parse() {
        return Ok((Token::Number(number), end));
    }
    Ok((Token::Name(word.replace('"', "")), end))
}

/// Maximum depth of parentheses, which keeps the recursion from overflowing the stack.
const DEEPEST: u32 = 64;

struct Reader<'t> {
    tokens: &'t [Token],
    at: usize,
}

impl Reader<'_> {
    fn next(&mut self) -> Option<Token> {
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        token
    }

    /// Consumes and returns the next operator if it is one of `one_of`.
    fn operator(&mut self, one_of: [Operator; 2]) -> Option<Operator> {
        match self.tokens.get(self.at) {
            Some(Token::Operator(operator)) if one_of.contains(operator) => {
                self.at += 1;
                Some(*operator)
            }
            _ => None,
        }
    }

    fn sum(&mut self, depth: u32) -> Result<Expression, String> {
        let mut left = self.product(depth)?;
        while let Some(operator) = self.operator([Operator::Plus, Operator::Minus]) {
            left = Expression::Of(Box::new(left), operator, Box::new(self.product(depth)?));
        }
        Ok(left)
    }

    fn product(&mut self, depth: u32) -> Result<Expression, String> {
        let mut left = self.one(depth)?;
        while let Some(operator) = self.operator([Operator::Times, Operator::Over]) {
            left = Expression::Of(Box::new(left), operator, Box::new(self.one(depth)?));
        }
        Ok(left)
    }

    fn one(&mut self, depth: u32) -> Result<Expression, String> {
        match self.next() {
            Some(Token::Number(number)) => Ok(Expression::Number(number)),
            Some(Token::Name(name)) => Ok(Expression::Name(name)),
            Some(Token::Open) if depth < DEEPEST => {
                let inner = self.sum(depth + 1)?;
                match self.next() {
                    Some(Token::Close) => Ok(inner),
                    _ => Err("a parenthesis is not closed".to_owned()),
                }
            }
            Some(Token::Open) => Err("parentheses are nested too deeply".to_owned()),
            Some(other) => Err(format!("'{other}' stands where a name or a number should")),
            None => Err("a name or a number is missing at the end".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<f64, String> {
        let of = |name: &str| match name {
            "a.b c" => Some(6.0),
            "send/recv pp" => Some(4.0),
            "t[x=1, y=a-b]" => Some(5.0),
            _ => None,
        };
        Expression::parse(text)?.value(&of).map_err(str::to_owned)
    }

    #[test]
    fn operators_bind_as_in_school() {
        for (text, is) in [
            ("1 + 2 * 3", 7.0),
            ("(1 + 2) * 3", 9.0),
            ("8 / 2 / 2", 2.0),
            ("8 - 2 - 2", 4.0),
            ("a.b c / 3", 2.0),
            ("a.b c/3 + \"send/recv pp\"", 6.0),
            ("t[x=1, y=a-b] * 2", 10.0),
            ("0.001", 1e-3),
        ] {
            assert_eq!(value(text), Ok(is), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "1 +", "* 2", "(1", "1)", "a[", "\"a", "+", "1 2 (", ")("] {
            assert!(value(text).is_err(), "{text}");
        }
        assert!(value(&"(".repeat(100_000)).unwrap_err().contains("too deeply"));
        assert_eq!(value("unknown"), Err("unknown".to_owned()));
    }
}
