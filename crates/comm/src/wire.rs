//! Messages as bytes: how they travel through sockets and shared memory.
//!
//! A frame is a fixed prelude, the purpose of the message and its payload. Nothing is believed: a
//! frame that could not have been written by [`encode`] is an error, and memory grows with what has
//! really arrived, not with what a length promises.

use crate::collective::CollectiveSpec;
use crate::transport::{Header, Payload, Purpose, Tag};
use paceline_plan::collective::{CollectiveKind, Order, Reduction};
use paceline_plan::dtype::DType;
use std::collections::VecDeque;
use thiserror::Error;

/// The bytes before the purpose.
const PRELUDE: usize = 32;
/// The longest purpose; algorithms write themselves in a few words.
const LONGEST_PURPOSE: usize = 256;
/// The longest payload.
const LONGEST_PAYLOAD: u64 = 1 << 40;
/// By how much the memory for a payload grows ahead of what has arrived.
const GROWTH: usize = 1 << 20;
const MAGIC: u32 = u32::from_le_bytes(*b"PLM1");
const MESSAGE: u8 = 1;
const GOODBYE: u8 = 2;

/// Why bytes are not a frame.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The first bytes are not those of a frame.
    #[error("what arrived is no frame of this program")]
    Magic,
    /// A length is beyond what any frame has.
    #[error("a frame claims {found} bytes of {what}; at most {limit} are possible")]
    Length {
        /// What the length is of.
        what: &'static str,
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

/// The bytes that stand before a payload on the wire.
pub fn encode(header: &Header, payload: usize) -> Vec<u8> {
    let mut bytes = vec![0; PRELUDE];
    encode_purpose(&header.purpose, &mut bytes);
    let purpose = (bytes.len() - PRELUDE) as u16;
    bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[4] = MESSAGE;
    bytes[6..8].copy_from_slice(&purpose.to_le_bytes());
    bytes[8..16].copy_from_slice(&(payload as u64).to_le_bytes());
    let tag = u64::from(header.tag.channel()) << 32 | u64::from(header.tag.sequence());
    bytes[16..24].copy_from_slice(&tag.to_le_bytes());
    bytes[24..28].copy_from_slice(&header.round.to_le_bytes());
    bytes
}

/// The last frame of a rank that leaves in peace.
pub(crate) fn goodbye() -> Vec<u8> {
    let mut bytes = vec![0; PRELUDE];
    bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[4] = GOODBYE;
    bytes
}

/// What a peer sent.
#[derive(Clone, Debug, PartialEq)]
pub enum Incoming {
    /// A message.
    Message(Payload),
    /// The peer leaves; nothing follows.
    Goodbye,
}

/// Puts frames together from bytes that arrive in pieces of any size.
#[derive(Debug, Default)]
pub struct Assembler {
    head: Vec<u8>,
    /// The frame whose payload is arriving, and how much of it is there.
    current: Option<(Header, u64)>,
    payload: Vec<u8>,
    arrived: usize,
    /// The last purpose and its bytes: most messages have the one of their predecessor.
    last: Option<(Vec<u8>, Purpose)>,
}

impl Assembler {
    /// Takes bytes in and adds what they complete to `done`; `spare` gives memory for payloads.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        done: &mut VecDeque<Incoming>,
        spare: &mut dyn FnMut(usize) -> Vec<u8>,
    ) -> Result<(), WireError> {
        while !bytes.is_empty() {
            let space = self.space();
            let n = space.len().min(bytes.len());
            space[..n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if let Some(frame) = self.advance(n, spare)? {
                done.push_back(frame);
            }
        }
        Ok(())
    }

    /// Where the next bytes of the stream belong; never empty.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        match self.current {
            Some((_, length)) => {
                let end = length.min((self.arrived + GROWTH) as u64) as usize;
                if self.payload.len() < end {
                    self.payload.resize(end, 0);
                }
                &mut self.payload[self.arrived..]
            }
            None => {
                let wanted = self.head_length();
                if self.head.len() < wanted {
                    self.head.resize(wanted, 0);
                }
                &mut self.head[self.arrived..wanted]
            }
        }
    }

    /// Notes that so many bytes have been written to the [`space`](Self::space), and gives the
    /// frame that they complete.
    pub(crate) fn advance(
        &mut self,
        n: usize,
        spare: &mut dyn FnMut(usize) -> Vec<u8>,
    ) -> Result<Option<Incoming>, WireError> {
        self.arrived += n;
        if self.current.is_none() {
            if self.arrived < PRELUDE {
                return Ok(None);
            }
            let wanted = check_prelude(&self.head)?;
            if self.arrived < wanted {
                return Ok(None);
            }
            self.arrived = 0;
            if self.head[4] == GOODBYE {
                self.head.clear();
                return Ok(Some(Incoming::Goodbye));
            }
            let header = self.header()?;
            let length = u64::from_le_bytes(array(&self.head, 8));
            self.head.clear();
            self.current = Some((header, length));
            self.payload = spare(length.min(GROWTH as u64) as usize);
            if self.payload.len() as u64 > length {
                self.payload.truncate(length as usize);
            }
        }
        let Some((header, length)) = self.current else { return Ok(None) };
        if (self.arrived as u64) < length {
            return Ok(None);
        }
        self.arrived = 0;
        self.current = None;
        let mut data = std::mem::take(&mut self.payload);
        data.truncate(length as usize);
        Ok(Some(Incoming::Message(Payload { header, data })))
    }

    /// How long the head is, as far as that is known.
    fn head_length(&self) -> usize {
        if self.arrived < PRELUDE { PRELUDE } else { PRELUDE + purpose_length(&self.head) }
    }

    fn header(&mut self) -> Result<Header, WireError> {
        let bytes = &self.head[PRELUDE..];
        let purpose = match &self.last {
            Some((last, purpose)) if last == bytes => *purpose,
            _ => {
                let purpose = decode_purpose(bytes)?;
                self.last = Some((bytes.to_vec(), purpose));
                purpose
            }
        };
        let tag = u64::from_le_bytes(array(&self.head, 16));
        let round = u32::from_le_bytes(array(&self.head, 24));
        Ok(Header { tag: Tag::new((tag >> 32) as u32, tag as u32), purpose, round })
    }
}

fn purpose_length(head: &[u8]) -> usize {
    u16::from_le_bytes(array(head, 6)) as usize
}

/// Refuses impossible preludes, and says how long the head is.
fn check_prelude(head: &[u8]) -> Result<usize, WireError> {
    if u32::from_le_bytes(array(head, 0)) != MAGIC {
        return Err(WireError::Magic);
    }
    let payload = u64::from_le_bytes(array(head, 8));
    let purpose = purpose_length(head);
    match head[4] {
        MESSAGE => {}
        GOODBYE if purpose == 0 && payload == 0 => {}
        _ => return Err(WireError::Field { what: "kind" }),
    }
    if purpose > LONGEST_PURPOSE {
        let (found, limit) = (purpose as u64, LONGEST_PURPOSE as u64);
        return Err(WireError::Length { what: "purpose", found, limit });
    }
    if payload > LONGEST_PAYLOAD {
        let (found, limit) = (payload, LONGEST_PAYLOAD);
        return Err(WireError::Length { what: "payload", found, limit });
    }
    Ok(PRELUDE + purpose)
}

const DTYPES: [DType; 6] = [DType::F32, DType::Bf16, DType::F16, DType::Fp8, DType::U32, DType::U8];
const ORDERS: [Order; 2] = [Order::Canonical, Order::Free];
const REDUCTIONS: [Reduction; 2] = [Reduction::Sum, Reduction::Max];

fn index<T: PartialEq>(all: &[T], one: T) -> u8 {
    all.iter().position(|other| *other == one).map_or(u8::MAX, |i| i as u8)
}

fn encode_purpose(purpose: &Purpose, bytes: &mut Vec<u8>) {
    match *purpose {
        Purpose::Collective { spec, ranks, elements, dtype } => {
            let CollectiveSpec { kind, algorithm, order, reduction, root, block } = spec;
            bytes.extend([0, index(&CollectiveKind::ALL, kind), index(&ORDERS, order)]);
            bytes.extend([index(&REDUCTIONS, reduction), index(&DTYPES, dtype)]);
            bytes.extend(root.to_le_bytes());
            bytes.extend(block.to_le_bytes());
            bytes.extend(ranks.to_le_bytes());
            bytes.extend(elements.to_le_bytes());
            // Its text form, so that a new algorithm needs no number here.
            bytes.extend(algorithm.to_string().into_bytes());
        }
        Purpose::PointToPoint { elements, dtype } => {
            bytes.extend([1, index(&DTYPES, dtype)]);
            bytes.extend(elements.to_le_bytes());
        }
        Purpose::Barrier { ranks } => {
            bytes.push(2);
            bytes.extend(ranks.to_le_bytes());
        }
    }
}

fn decode_purpose(bytes: &[u8]) -> Result<Purpose, WireError> {
    let field = |what| WireError::Field { what };
    let dtype = |i: u8| DTYPES.get(i as usize).copied().ok_or(field("dtype"));
    match *bytes {
        [0, kind, order, reduction, element, ref rest @ ..] if rest.len() >= 24 => {
            let algorithm =
                std::str::from_utf8(&rest[24..]).ok().and_then(|text| text.parse().ok());
            let spec = CollectiveSpec {
                kind: *CollectiveKind::ALL.get(kind as usize).ok_or(field("collective"))?,
                algorithm: algorithm.ok_or(field("algorithm"))?,
                order: *ORDERS.get(order as usize).ok_or(field("order"))?,
                reduction: *REDUCTIONS.get(reduction as usize).ok_or(field("reduction"))?,
                root: u32::from_le_bytes(array(rest, 0)),
                block: u64::from_le_bytes(array(rest, 4)),
            };
            let ranks = u32::from_le_bytes(array(rest, 12));
            let elements = u64::from_le_bytes(array(rest, 16));
            Ok(Purpose::Collective { spec, ranks, elements, dtype: dtype(element)? })
        }
        [1, element, ref rest @ ..] if rest.len() == 8 => {
            let elements = u64::from_le_bytes(array(rest, 0));
            Ok(Purpose::PointToPoint { elements, dtype: dtype(element)? })
        }
        [2, ref rest @ ..] if rest.len() == 4 => {
            Ok(Purpose::Barrier { ranks: u32::from_le_bytes(array(rest, 0)) })
        }
        _ => Err(field("purpose")),
    }
}

/// Bytes at a place that the caller knows to exist.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        array.copy_from_slice(found);
    }
    array
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::collective::Algorithm;
    use proptest::prelude::*;

    fn frames() -> Vec<Payload> {
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
        let frame = |(i, purpose): (u32, &Purpose)| Payload {
            header: Header { tag: Tag::new(u32::MAX - i, i), purpose: *purpose, round: 7 * i },
            data: (0..i * 1000).map(|b| b as u8).collect(),
        };
        (0..).zip(&purposes).map(frame).collect()
    }

    fn stream() -> Vec<u8> {
        let message =
            |m: Payload| encode(&m.header, m.data.len()).into_iter().chain(m.data).collect();
        let mut frames: Vec<Vec<u8>> = frames().into_iter().map(message).collect();
        frames.push(goodbye());
        frames.concat()
    }

    fn assemble(pieces: &[&[u8]]) -> Result<Vec<Incoming>, WireError> {
        let (mut assembler, mut done) = (Assembler::default(), VecDeque::new());
        for piece in pieces {
            assembler.feed(piece, &mut done, &mut |_| vec![9; 100])?;
        }
        Ok(done.into())
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(cuts in prop::collection::vec(1usize..700, 1..400)) {
            let stream = stream();
            let (mut rest, mut pieces) = (stream.as_slice(), Vec::new());
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            pieces.push(rest);
            let mut wanted: Vec<_> = frames().into_iter().map(Incoming::Message).collect();
            wanted.push(Incoming::Goodbye);
            prop_assert_eq!(assemble(&pieces), Ok(wanted));
        }

        #[test]
        fn garbage_is_refused_or_waited_for(mut bytes in prop::collection::vec(any::<u8>(), 0..200), valid in any::<bool>()) {
            if valid && bytes.len() > 4 {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
            }
            let _ = assemble(&[&bytes]);
        }

        #[test]
        fn a_flipped_bit_never_panics(at in 0usize..1000, bit in 0u8..8) {
            let mut stream = stream();
            let at = at % stream.len();
            stream[at] ^= 1 << bit;
            let _ = assemble(&[&stream]);
        }
    }

    #[test]
    fn giant_lengths_are_refused_and_large_ones_cost_nothing_in_advance() {
        let header = frames()[2].header;
        let mut bytes = encode(&header, 0);
        bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        let error = assemble(&[&bytes]).unwrap_err().to_string();
        assert!(error.contains("claims 18446744073709551615 bytes of payload"), "{error}");
        bytes[8..16].copy_from_slice(&LONGEST_PAYLOAD.to_le_bytes());
        let mut assembler = Assembler::default();
        assembler.feed(&bytes, &mut VecDeque::new(), &mut Vec::with_capacity).unwrap();
        assert!(assembler.space().len() <= GROWTH);
        assert_eq!(assemble(&[b"GET / HTTP/1.1\r\nHost: paceline\r\n\r\n"]), Err(WireError::Magic));
    }
}
