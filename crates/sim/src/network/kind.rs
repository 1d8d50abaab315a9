//! Network backends by name.

use serde::Serialize;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Network backend that times communication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkKind {
    /// Times every op by latency and bandwidth, as if it had the links to itself.
    #[default]
    Analytic,
    /// Simulates all concurrent traffic with fair sharing of links.
    Flow,
}

impl NetworkKind {
    /// All kinds, the default first.
    pub const ALL: [Self; 2] = [Self::Analytic, Self::Flow];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Analytic => "analytic",
            Self::Flow => "flow",
        }
    }
}

impl fmt::Display for NetworkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error for a name that is not a known network.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UnknownNetwork {
    /// Planned, but not available yet.
    #[error("the packet network is not available yet; use analytic or flow")]
    Packet,
    /// Unknown name.
    #[error("'{0}' is not a known network; known are: analytic, flow")]
    Unknown(String),
}

impl FromStr for NetworkKind {
    type Err = UnknownNetwork;

    fn from_str(text: &str) -> Result<Self, UnknownNetwork> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == text);
        known.ok_or_else(|| match text {
            "packet" => UnknownNetwork::Packet,
            other => UnknownNetwork::Unknown(other.to_owned()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_network() {
        for kind in NetworkKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!(NetworkKind::default(), NetworkKind::Analytic);
        let told = |text: &str| text.parse::<NetworkKind>().unwrap_err().to_string();
        assert_eq!(told("packet"), "the packet network is not available yet; use analytic or flow");
        assert_eq!(told("Flow"), "'Flow' is not a known network; known are: analytic, flow");
    }
}
