use super::{Pass, ScheduleError};
use crate::ids::{Stage, StageRank};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Available schedules, as listed in messages.
pub(super) const AVAILABLE: &str = "gpipe, 1f1b, interleaved:V, zb-h1, zb-h1:V, dualpipev, pipedream, \
     pipedream:2bw";

/// Pipeline schedule of a strategy, written `gpipe`, `1f1b`, `interleaved:V`, `zb-h1`, `zb-h1:V`,
/// `dualpipev`, `pipedream` or `pipedream:2bw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al., 2019, arXiv 1811.06965, section 2.2).
    GPipe,
    /// One forward, one backward, with a flush at the end of the iteration (PipeDream-Flush:
    /// Narayanan et al., 2021, arXiv 2006.09503, section 3.2). The same bubble as GPipe, with at
    /// most `ranks` microbatches in flight.
    OneFOneB,
    /// 1F1B over several chunks of layers per rank (Narayanan et al., 2021, arXiv 2104.04473,
    /// section 2.2.2): the bubble shrinks by the number of chunks, and the number of messages grows
    /// by it.
    Interleaved {
        /// Virtual stages per rank. One chunk is legal, as in PyTorch, but keeps more activations
        /// than 1F1B for the same bubble.
        chunks: u16,
    },
    /// 1F1B with a split backward pass (ZB-H1: Qi et al., 2023, arXiv 2401.10241, section 2.1): the
    /// previous stage waits only for the input gradient, and weight gradients fill the tail. If all
    /// three passes cost the same, the bubble is a third of 1F1B's, with as many microbatches in
    /// flight. With several chunks per rank, it is PyTorch's interleaved form.
    ZbH1 {
        /// Virtual stages per rank.
        chunks: u16,
    },
    /// DeepSeek's DualPipe cut in half (Qi et al., 2025; deepseek-ai/DualPipe, `dualpipev.py`): two
    /// chunks per rank, laid out as a V, so that the first rank has the first and the last stage. A
    /// forward and a backward pass of different chunks are always paired.
    DualPipeV,
    /// 1F1B without flush (PipeDream): forward passes of later minibatches start, on the weights of
    /// that time, while backward passes of earlier ones are still running.
    PipeDream {
        /// Weight versions that a minibatch uses.
        versions: Versions,
    },
}

/// Weight versions that a pipeline without flush retains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Versions {
    /// As many as there are minibatches in flight on a stage. A forward pass reads the newest
    /// version, and the backward pass of the same minibatch reads that version again (weight
    /// stashing: Narayanan et al., SOSP 2019, section 3.3). Every minibatch ends with an update.
    Stashed,
    /// Two: all passes of a batch of microbatches read the version before the newest at that time
    /// (PipeDream-2BW: Narayanan et al., 2021, arXiv 2006.09503, section 3.1): W(t + 1) = W(t) −
    /// ν·∇f(W(t − 1)).
    Two,
}

impl ScheduleKind {
    /// Virtual stages per pipeline rank.
    pub const fn chunks(self) -> u16 {
        match self {
            Self::GPipe | Self::OneFOneB | Self::PipeDream { .. } => 1,
            Self::Interleaved { chunks } | Self::ZbH1 { chunks } => chunks,
            Self::DualPipeV => 2,
        }
    }

    /// Passes that the schedule's actions use.
    pub const fn passes(self) -> &'static [Pass] {
        match self {
            Self::GPipe | Self::OneFOneB | Self::Interleaved { .. } | Self::PipeDream { .. } => {
                &[Pass::Forward, Pass::Backward]
            }
            Self::ZbH1 { .. } => &[Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight],
            Self::DualPipeV => {
                &[Pass::Forward, Pass::Backward, Pass::BackwardInput, Pass::BackwardWeight]
            }
        }
    }

    /// Returns true if some backward passes are split into input and weight gradients.
    pub fn splits_backward(self) -> bool {
        self.passes().contains(&Pass::BackwardWeight)
    }

    /// Number of microbatches whose forward pass a rank has already run when an iteration begins; 0
    /// unless iterations overlap.
    pub const fn ahead(self, rank: u16, ranks: u16) -> u32 {
        match self {
            Self::GPipe
            | Self::OneFOneB
            | Self::Interleaved { .. }
            | Self::ZbH1 { .. }
            | Self::DualPipeV => 0,
            Self::PipeDream { .. } => ranks.saturating_sub(rank + 1) as u32,
        }
    }

    /// Returns true if each iteration completes before the next one begins.
    pub const fn flushes(self) -> bool {
        !matches!(self, Self::PipeDream { .. })
    }

    /// Pipeline rank that holds a virtual stage, for `ranks` pipeline ranks: round-robin, as in
    /// PyTorch and Megatron-LM, or down and back up if the stages form a V.
    ///
    /// For `ranks == 0` it returns the stage's own number, as if each stage had a rank.
    pub fn rank_of(self, stage: Stage, ranks: u16) -> StageRank {
        let Some(at) = stage.0.checked_rem(ranks) else { return StageRank(stage.0) };
        let upwards = self == Self::DualPipeV && (stage.0 / ranks) % 2 == 1;
        StageRank(if upwards { ranks - 1 - at } else { at })
    }

    /// Virtual stages that a pipeline rank holds, in model order.
    pub fn stages_of(self, rank: StageRank, ranks: u16) -> impl Iterator<Item = Stage> {
        let all = u32::from(ranks) * u32::from(self.chunks());
        let stages = (0..all).map_while(|stage| u16::try_from(stage).ok()).map(Stage);
        stages.filter(move |&stage| self.rank_of(stage, ranks) == rank)
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GPipe => f.write_str("gpipe"),
            Self::OneFOneB => f.write_str("1f1b"),
            Self::Interleaved { chunks } => write!(f, "interleaved:{chunks}"),
            Self::ZbH1 { chunks: 1 } => f.write_str("zb-h1"),
            Self::ZbH1 { chunks } => write!(f, "zb-h1:{chunks}"),
            Self::DualPipeV => f.write_str("dualpipev"),
            Self::PipeDream { versions: Versions::Stashed } => f.write_str("pipedream"),
            Self::PipeDream { versions: Versions::Two } => f.write_str("pipedream:2bw"),
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
            ("zb-h1", None) => Ok(Self::ZbH1 { chunks: 1 }),
            ("zb-h1", Some(chunks)) => match chunks.parse() {
                Ok(chunks @ 1..) => Ok(Self::ZbH1 { chunks }),
                _ => Err(ScheduleError::Chunks { given: given() }),
            },
            ("dualpipev", None) => Ok(Self::DualPipeV),
            ("pipedream", None) => Ok(Self::PipeDream { versions: Versions::Stashed }),
            ("pipedream", Some("2bw")) => Ok(Self::PipeDream { versions: Versions::Two }),
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
        for text in [
            "gpipe",
            "1f1b",
            "interleaved:1",
            "interleaved:4",
            "interleaved:65535",
            "zb-h1",
            "zb-h1:3",
            "dualpipev",
            "pipedream",
            "pipedream:2bw",
        ] {
            let kind: ScheduleKind = text.parse().unwrap();
            assert_eq!(kind.to_string(), text);
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<ScheduleKind>(&json).unwrap(), kind);
        }
    }

    #[test]
    fn one_chunk_is_the_plain_form() {
        assert_eq!("zb-h1:1".parse(), Ok(ScheduleKind::ZbH1 { chunks: 1 }));
    }

    #[test]
    fn stages_go_round_the_ranks_or_down_and_up_again() {
        let round = ScheduleKind::ZbH1 { chunks: 2 };
        assert_eq!(round.rank_of(Stage(5), 4), StageRank(1));
        assert_eq!(round.rank_of(Stage(5), 0), StageRank(5));
        let of = |kind: ScheduleKind, rank| kind.stages_of(StageRank(rank), 4).collect::<Vec<_>>();
        assert_eq!(of(round, 1), [Stage(1), Stage(5)]);
        assert_eq!(of(ScheduleKind::DualPipeV, 0), [Stage(0), Stage(7)]);
        assert_eq!(of(ScheduleKind::DualPipeV, 3), [Stage(3), Stage(4)]);
        assert_eq!(of(ScheduleKind::GPipe, 4), []);
    }

    #[test]
    fn nonsense_is_told_apart() {
        for text in ["", "GPipe", "gpipe:2", "1f1b:", "pipedream:3", "dualpipev:2", "gpipe "] {
            let error = text.parse::<ScheduleKind>().unwrap_err();
            assert_eq!(error, ScheduleError::Unknown { given: text.to_owned() });
            assert!(error.to_string().contains("(available: gpipe, 1f1b, interleaved:V, "));
        }
        for chunks in ["interleaved", "interleaved:", "interleaved:0", "interleaved:-1", "zb-h1:0"]
        {
            let error = chunks.parse::<ScheduleKind>().unwrap_err();
            assert_eq!(error, ScheduleError::Chunks { given: chunks.to_owned() });
        }
        assert!("interleaved:65536".parse::<ScheduleKind>().is_err());
        assert!("interleaved:2:2".parse::<ScheduleKind>().is_err());
    }
}
