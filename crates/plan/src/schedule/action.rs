use crate::ids::{Microbatch, Stage};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// One pass of one microbatch through one virtual stage. Its text form is one token: `2F0` for
/// stage 2, forward, microbatch 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Action {
    /// The virtual stage whose layers run.
    pub stage: Stage,
    /// The pass that runs.
    pub pass: Pass,
    /// The microbatch that is processed.
    pub microbatch: Microbatch,
}

/// Kind of computation of an action. The letters are PyTorch's, so that its tables can be compared
/// with these as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pass {
    /// `F`: activations.
    #[serde(rename = "F")]
    Forward,
    /// `B`: input gradient and weight gradients.
    #[serde(rename = "B")]
    Backward,
    /// `I`: input gradient only; the previous stage waits for it.
    #[serde(rename = "I")]
    BackwardInput,
    /// `W`: weight gradients only; needed only by the optimizer.
    #[serde(rename = "W")]
    BackwardWeight,
}

impl Pass {
    /// Letter used in a token.
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
        }
    }
}

/// Error for a token that is not an action.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("'{given}' is not an action; write stage, pass (F, B, I or W) and microbatch, as in 2F0")]
pub struct ActionParseError {
    /// The token as given.
    pub given: String,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.letter())
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `pad` honours the width that tables request.
        f.pad(&format!("{}{}{}", self.stage, self.pass, self.microbatch))
    }
}

impl FromStr for Action {
    type Err = ActionParseError;

    fn from_str(text: &str) -> Result<Self, ActionParseError> {
        parse(text).ok_or_else(|| ActionParseError { given: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<Action> {
    let (stage, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let mut rest = rest.chars();
    let pass = match rest.next()? {
        'F' => Pass::Forward,
        'B' => Pass::Backward,
        'I' => Pass::BackwardInput,
        'W' => Pass::BackwardWeight,
        _ => return None,
    };
    let microbatch = rest.as_str();
    // `parse` alone would also accept a sign.
    if !microbatch.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some(Action {
        stage: Stage(stage.parse().ok()?),
        pass,
        microbatch: Microbatch(microbatch.parse().ok()?),
    })
}

impl TryFrom<String> for Action {
    type Error = ActionParseError;

    fn try_from(text: String) -> Result<Self, ActionParseError> {
        text.parse()
    }
}

impl From<Action> for String {
    fn from(action: Action) -> Self {
        action.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tokens_are_pytorchs() {
        let action = |stage, pass, microbatch| Action {
            stage: Stage(stage),
            pass,
            microbatch: Microbatch(microbatch),
        };
        assert_eq!(action(2, Pass::Forward, 0).to_string(), "2F0");
        assert_eq!(action(1, Pass::Backward, 3).to_string(), "1B3");
        assert_eq!("0I2".parse(), Ok(action(0, Pass::BackwardInput, 2)));
        assert_eq!("0W2".parse(), Ok(action(0, Pass::BackwardWeight, 2)));
        assert_eq!(serde_json::to_string(&action(2, Pass::Forward, 0)).unwrap(), "\"2F0\"");
    }

    #[test]
    fn other_tokens_are_refused() {
        for text in [
            "",
            "F",
            "2F",
            "F0",
            "2f0",
            "2X0",
            "2F0 ",
            "+2F0",
            "2F+0",
            "65536F0",
            "2F4294967296",
            "2é0",
        ] {
            let error = text.parse::<Action>().unwrap_err();
            assert!(error.to_string().contains(&format!("'{text}'")));
        }
    }

    proptest! {
        #[test]
        fn text_round_trips(stage: u16, pass in 0usize..4, microbatch: u32) {
            let passes =
                [Pass::Forward, Pass::Backward, Pass::BackwardInput, Pass::BackwardWeight];
            let (stage, microbatch) = (Stage(stage), Microbatch(microbatch));
            let action = Action { stage, pass: passes[pass], microbatch };
            prop_assert_eq!(action.to_string().parse(), Ok(action));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC*") {
            let _ = text.parse::<Action>();
        }
    }
}
