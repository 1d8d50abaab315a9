use super::ScheduleError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The schedules that can be asked for today, as messages list them.
pub(super) const AVAILABLE: &str = "gpipe, 1f1b, interleaved:V";

/// Which pipeline schedule a strategy asks for; written `gpipe`, `1f1b` or `interleaved:V`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965, section 2.2).
    GPipe,
    /// One forward, one backward, with a flush at the end of the iteration (PipeDream-Flush:
    /// Narayanan et al., 2021, arXiv 2006.09503, section 3.2). The same bubble as GPipe with at
    /// most `ranks` microbatches kept.
    OneFOneB,
    /// 1F1B over several chunks of layers per rank (Narayanan et al., 2021, arXiv 2104.04473,
    /// section 2.2.2): the bubble shrinks by the number of chunks, for as many times the messages.
    Interleaved {
        /// Virtual stages held by each rank. One chunk is legal, as in PyTorch, but keeps more
        /// activations than 1F1B for the same bubble.
        chunks: u16,
    },
}

impl ScheduleKind {
    /// Virtual stages held by each pipeline rank.
    pub const fn chunks(self) -> u16 {
        match self {
            Self::GPipe | Self::OneFOneB => 1,
            Self::Interleaved { chunks } => chunks,
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GPipe => f.write_str("gpipe"),
            Self::OneFOneB => f.write_str("1f1b"),
            Self::Interleaved { chunks } => write!(f, "interleaved:{chunks}"),
        }
    }
}

impl FromStr for ScheduleKind {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let given = || text.to_owned();
        let (name, chunks) = match text.split_once(':') {
            Some((name, chunks)) => (name, Some(chunks)),
            None => (text, None),
        };
        match (name, chunks) {
            ("gpipe", None) => Ok(Self::GPipe),
            ("1f1b", None) => Ok(Self::OneFOneB),
            ("interleaved", chunks) => match chunks.and_then(|chunks| chunks.parse().ok()) {
                Some(chunks @ 1..) => Ok(Self::Interleaved { chunks }),
                _ => Err(ScheduleError::Chunks { given: given() }),
            },
            ("zb-h1", _) | ("dualpipev" | "pipedream", None) => {
                Err(ScheduleError::NotYet { given: given() })
            }
            _ => Err(ScheduleError::Unknown { given: given() }),
        }
    }
}

impl TryFrom<String> for ScheduleKind {
    type Error = ScheduleError;

    fn try_from(text: String) -> Result<Self, ScheduleError> {
        text.parse()
    }
}

impl From<ScheduleKind> for String {
    fn from(kind: ScheduleKind) -> Self {
        kind.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for text in ["gpipe", "1f1b", "interleaved:1", "interleaved:4", "interleaved:65535"] {
            let kind: ScheduleKind = text.parse().unwrap();
            assert_eq!(kind.to_string(), text);
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<ScheduleKind>(&json).unwrap(), kind);
        }
    }

    #[test]
    fn schedules_to_come_say_so_and_list_what_there_is() {
        for text in ["zb-h1", "zb-h1:2", "dualpipev", "pipedream"] {
            let error = text.parse::<ScheduleKind>().unwrap_err();
            assert_eq!(error, ScheduleError::NotYet { given: text.to_owned() });
            assert_eq!(
                error.to_string(),
                format!(
                    "schedule '{text}' is not available yet (available: gpipe, 1f1b, interleaved:V)"
                )
            );
        }
    }

    #[test]
    fn nonsense_is_told_apart() {
        for text in ["", "GPipe", "gpipe:2", "1f1b:", "pipedream:3", "gpipe "] {
            let error = text.parse::<ScheduleKind>().unwrap_err();
            assert_eq!(error, ScheduleError::Unknown { given: text.to_owned() });
        }
        for chunks in ["interleaved", "interleaved:", "interleaved:0", "interleaved:-1"] {
            let error = chunks.parse::<ScheduleKind>().unwrap_err();
            assert_eq!(error, ScheduleError::Chunks { given: chunks.to_owned() });
        }
        assert!("interleaved:65536".parse::<ScheduleKind>().is_err());
        assert!("interleaved:2:2".parse::<ScheduleKind>().is_err());
    }
}
