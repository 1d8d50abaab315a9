//! Wire format of messages on sockets and in shared memory.
//!
//! A frame is a head of fixed size and a payload, padded to a multiple of [`GRAIN`]. So heads span
//! no more cache lines than necessary, and partial data ends between two elements. No input is
//! trusted: a head that [`encode`] could not have written is an error, and memory grows with the
//! data actually received, not with an announced length.

mod purpose;

pub use crate::frame_reader::drain;

use crate::transport::{Header, Tag};
use thiserror::Error;

/// Bytes of a frame head.
pub const HEAD: usize = 32 + purpose::BYTES;
/// Alignment of frames in their stream: a cache line, and a whole number of any elements.
pub const GRAIN: usize = 64;
/// Maximum payload in bytes.
const LONGEST_PAYLOAD: u64 = 1 << 40;
const MAGIC: u32 = u32::from_le_bytes(*b"PLM3");
const MESSAGE: u8 = 1;
const GOODBYE: u8 = 2;
const MESSAGE_ZERO_COPY: u8 = 3;
const ACK: u8 = 4;

/// Reason why bytes are not a frame.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The first bytes are not those of a frame.
    #[error("received bytes are not a frame of this program")]
    Magic,
    /// A length exceeds the maximum.
    #[error("a frame claims {found} bytes of payload; at most {limit} are possible")]
    Length {
        /// Length found.
        found: u64,
        /// Maximum length.
        limit: u64,
    },
    /// A field has an invalid value.
    #[error("a frame has an impossible {what}")]
    Field {
        /// Name of the field.
        what: &'static str,
    },
}

/// Decoded head of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message.
    Message {
        /// Header of the message.
        header: Header,
        /// Number of payload bytes that follow, without padding.
        payload: usize,
        /// True if this is a zero-copy send: the payload may still be in the sender's memory and
        /// must be acked once taken.
        in_place: bool,
    },
    /// Ack: total number of zero-copy messages the peer has taken.
    Taken {
        /// Number of messages.
        messages: u64,
    },
    /// The peer leaves; nothing follows.
    Goodbye,
}

/// Encodes the head of a message frame. With `in_place`, the payload may stay in the sender's
/// memory until it has been taken.
pub fn encode(header: &Header, payload: usize, in_place: bool) -> [u8; HEAD] {
    let mut head = start(if in_place { MESSAGE_ZERO_COPY } else { MESSAGE }, payload as u64);
    let tag = u64::from(header.tag.channel()) << 32 | u64::from(header.tag.sequence());
    head[16..24].copy_from_slice(&tag.to_le_bytes());
    head[24..28].copy_from_slice(&header.round.to_le_bytes());
    if let Some(bytes) = head.last_chunk_mut() {
        purpose::encode(&header.purpose, bytes);
    }
    head
}

/// Last frame of a rank that leaves normally.
pub(crate) fn goodbye() -> [u8; HEAD] {
    start(GOODBYE, 0)
}

/// Acks `messages` zero-copy messages in total.
pub(crate) fn ack(messages: u64) -> [u8; HEAD] {
    start(ACK, messages)
}

fn start(kind: u8, number: u64) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    head[4] = kind;
    head[8..16].copy_from_slice(&number.to_le_bytes());
    head
}

/// Decodes a frame head.
pub fn decode(head: &[u8; HEAD]) -> Result<Frame, WireError> {
    if u32::from_le_bytes(array(head, 0)) != MAGIC {
        return Err(WireError::Magic);
    }
    let payload = u64::from_le_bytes(array(head, 8));
    match head[4] {
        MESSAGE | MESSAGE_ZERO_COPY if payload > LONGEST_PAYLOAD => {
            Err(WireError::Length { found: payload, limit: LONGEST_PAYLOAD })
        }
        kind @ (MESSAGE | MESSAGE_ZERO_COPY) => {
            let tag = u64::from_le_bytes(array(head, 16));
            let round = u32::from_le_bytes(array(head, 24));
            let purpose = match head.last_chunk() {
                Some(bytes) => purpose::decode(bytes)?,
                None => return Err(WireError::Field { what: "purpose" }),
            };
            let header = Header { tag: Tag::new((tag >> 32) as u32, tag as u32), purpose, round };
            let in_place = kind == MESSAGE_ZERO_COPY;
            Ok(Frame::Message { header, payload: payload as usize, in_place })
        }
        GOODBYE if payload == 0 => Ok(Frame::Goodbye),
        ACK => Ok(Frame::Taken { messages: payload }),
        _ => Err(WireError::Field { what: "kind" }),
    }
}

/// Number of bytes of a payload with its padding.
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
    use crate::steps::CollectiveSpec;
    use crate::transport::Purpose;
    use paceline_plan::collective::{Algorithm, CollectiveKind, Reduction, SummationOrder};
    use paceline_plan::dtype::DType;
    use proptest::prelude::*;

    /// Messages of several kinds and sizes.
    pub(crate) fn messages() -> Vec<(Header, Vec<u8>)> {
        let collective = |kind, algorithm| Purpose::Collective {
            spec: CollectiveSpec {
                kind,
                algorithm,
                order: SummationOrder::Free,
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
            // If a damaged head still decodes, encoding and decoding it again gives the same frame.
            match decode(&head) {
                Ok(message @ Frame::Message { header, payload, in_place }) => {
                    prop_assert_eq!(decode(&encode(&header, payload, in_place)), Ok(message));
                }
                Ok(Frame::Taken { messages }) => {
                    prop_assert_eq!(decode(&ack(messages)), Ok(Frame::Taken { messages }));
                }
                Ok(Frame::Goodbye) | Err(_) => {}
            }
        }
    }

    #[test]
    fn giant_lengths_and_foreign_bytes_are_refused() {
        let header = messages()[2].0;
        let mut head = encode(&header, 0, false);
        head[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        let error = decode(&head).unwrap_err().to_string();
        assert!(error.contains("claims 18446744073709551615 bytes of payload"), "{error}");
        let mut stranger = [b' '; HEAD];
        stranger[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(decode(&stranger), Err(WireError::Magic));
        assert_eq!(decode(&goodbye()), Ok(Frame::Goodbye));
        assert_eq!(decode(&ack(u64::MAX)), Ok(Frame::Taken { messages: u64::MAX }));
    }
}
