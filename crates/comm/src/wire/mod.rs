//! Messages as bytes: how they travel through sockets and shared memory.
//!
//! A frame is a head of fixed size and a payload, filled up to a multiple of [`GRAIN`], so that heads
//! never straddle more cache lines than they have to and what arrives in part ends between two
//! elements. Nothing is believed: a head that could not have been written by [`encode`] is an error,
//! and memory grows with what has really arrived, not with what a length promises.

mod purpose;

pub use crate::inflow::drain;

use crate::transport::{Header, Tag};
use thiserror::Error;

/// The bytes before a payload.
pub const HEAD: usize = 32 + purpose::BYTES;
/// Frames begin at multiples of this in their stream: a cache line, and any whole number of elements.
pub const GRAIN: usize = 64;
/// The longest payload.
const LONGEST_PAYLOAD: u64 = 1 << 40;
const MAGIC: u32 = u32::from_le_bytes(*b"PLM3");
const MESSAGE: u8 = 1;
const GOODBYE: u8 = 2;
const MESSAGE_IN_PLACE: u8 = 3;
const TAKEN: u8 = 4;

/// Why bytes are not a frame.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The first bytes are not those of a frame.
    #[error("what arrived is no frame of this program")]
    Magic,
    /// A length is beyond what any frame has.
    #[error("a frame claims {found} bytes of payload; at most {limit} are possible")]
    Length {
        /// What it claims to be.
        found: u64,
        /// What it can be.
        limit: u64,
    },
    /// A field has a value that means nothing.
    #[error("a frame has an impossible {what}")]
    Field {
        /// Which field.
        what: &'static str,
    },
}

/// The head of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message.
    Message {
        /// What it is for.
        header: Header,
        /// How many bytes follow, before they are filled up.
        payload: usize,
        /// Whether the sender may still have them where they lie, and is to be told once they have been
        /// taken.
        in_place: bool,
    },
    /// The peer has taken so many messages that went in place, all in all.
    Taken {
        /// How many.
        messages: u64,
    },
    /// The peer leaves; nothing follows.
    Goodbye,
}

/// The bytes that stand before a payload on the wire, which may lie in the sender's memory until it has been
/// taken.
pub fn encode(header: &Header, payload: usize, in_place: bool) -> [u8; HEAD] {
    let mut head = start(if in_place { MESSAGE_IN_PLACE } else { MESSAGE }, payload as u64);
    let tag = u64::from(header.tag.channel()) << 32 | u64::from(header.tag.sequence());
    head[16..24].copy_from_slice(&tag.to_le_bytes());
    head[24..28].copy_from_slice(&header.round.to_le_bytes());
    if let Some(bytes) = head.last_chunk_mut() {
        purpose::encode(&header.purpose, bytes);
    }
    head
}

/// The last frame of a rank that leaves in peace.
pub(crate) fn goodbye() -> [u8; HEAD] {
    start(GOODBYE, 0)
}

/// Says that so many messages have been taken that went in place.
pub(crate) fn taken(messages: u64) -> [u8; HEAD] {
    start(TAKEN, messages)
}

fn start(kind: u8, number: u64) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    head[4] = kind;
    head[8..16].copy_from_slice(&number.to_le_bytes());
    head
}

/// What a head says.
pub fn decode(head: &[u8; HEAD]) -> Result<Frame, WireError> {
    if u32::from_le_bytes(array(head, 0)) != MAGIC {
        return Err(WireError::Magic);
    }
    let payload = u64::from_le_bytes(array(head, 8));
    match head[4] {
        MESSAGE | MESSAGE_IN_PLACE if payload > LONGEST_PAYLOAD => {
            Err(WireError::Length { found: payload, limit: LONGEST_PAYLOAD })
        }
        kind @ (MESSAGE | MESSAGE_IN_PLACE) => {
            let tag = u64::from_le_bytes(array(head, 16));
            let round = u32::from_le_bytes(array(head, 24));
            let purpose = match head.last_chunk() {
                Some(bytes) => purpose::decode(bytes)?,
                None => return Err(WireError::Field { what: "purpose" }),
            };
            let header = Header { tag: Tag::new((tag >> 32) as u32, tag as u32), purpose, round };
            let in_place = kind == MESSAGE_IN_PLACE;
            Ok(Frame::Message { header, payload: payload as usize, in_place })
        }
        GOODBYE if payload == 0 => Ok(Frame::Goodbye),
        TAKEN => Ok(Frame::Taken { messages: payload }),
        _ => Err(WireError::Field { what: "kind" }),
    }
}

/// How many bytes a payload takes up in its stream.
pub(crate) const fn padded(payload: usize) -> usize {
    payload.next_multiple_of(GRAIN)
}

fn array<const N: usize>(head: &[u8; HEAD], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&head[at..at + N]);
    array
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::collective::CollectiveSpec;
    use crate::transport::Purpose;
    use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Reduction};
    use paceline_plan::dtype::DType;
    use proptest::prelude::*;

    /// Messages of several kinds and sizes.
    pub(crate) fn messages() -> Vec<(Header, Vec<u8>)> {
        let collective = |kind, algorithm| Purpose::Collective {
            spec: CollectiveSpec {
                kind,
                algorithm,
                order: Order::Free,
                reduction: Reduction::Max,
                root: 3,
                block: 1024,
            },
            ranks: 9,
            elements: u64::MAX,
            dtype: DType::Bf16,
        };
        let purposes = [
            collective(CollectiveKind::AllReduce, Algorithm::Ring),
            collective(CollectiveKind::AllToAll, Algorithm::ParameterServer { servers: 77 }),
            Purpose::PointToPoint { elements: 5, dtype: DType::U32 },
            Purpose::Barrier { ranks: 4 },
        ];
        let message = |(i, purpose): (u32, &Purpose)| {
            let header = Header { tag: Tag::new(i % 2, i), purpose: *purpose, round: 7 * i };
            (header, (0..i * 1000).map(|b| b as u8).collect())
        };
        (0..).zip(&purposes).map(message).collect()
    }

    proptest! {
        #[test]
        fn garbage_is_refused(bytes in prop::collection::vec(any::<u8>(), HEAD), valid in any::<bool>()) {
            let mut head: [u8; HEAD] = bytes.try_into().unwrap();
            if valid {
                head[..4].copy_from_slice(&MAGIC.to_le_bytes());
                head[4] = MESSAGE;
            }
            let _ = decode(&head);
        }

        #[test]
        fn what_is_understood_is_what_was_written(
            at in 0..HEAD,
            bit in 0u8..8,
            which in 0usize..4,
            in_place in any::<bool>(),
        ) {
            let (header, data) = &messages()[which];
            let mut head = encode(header, data.len(), in_place);
            let whole = Frame::Message { header: *header, payload: data.len(), in_place };
            prop_assert_eq!(decode(&head), Ok(whole));
            head[at] ^= 1 << bit;
            // Whatever a damaged head means, it means the same when written anew.
            match decode(&head) {
                Ok(message @ Frame::Message { header, payload, in_place }) => {
                    prop_assert_eq!(decode(&encode(&header, payload, in_place)), Ok(message));
                }
                Ok(Frame::Taken { messages }) => {
                    prop_assert_eq!(decode(&taken(messages)), Ok(Frame::Taken { messages }));
                }
                Ok(Frame::Goodbye) | Err(_) => {}
            }
        }
    }

    #[test]
    fn giant_lengths_and_strangers_are_refused() {
        let header = messages()[2].0;
        let mut head = encode(&header, 0, false);
        head[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        let error = decode(&head).unwrap_err().to_string();
        assert!(error.contains("claims 18446744073709551615 bytes of payload"), "{error}");
        let mut stranger = [b' '; HEAD];
        stranger[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(decode(&stranger), Err(WireError::Magic));
        assert_eq!(decode(&goodbye()), Ok(Frame::Goodbye));
        assert_eq!(decode(&taken(u64::MAX)), Ok(Frame::Taken { messages: u64::MAX }));
    }
}
