//! Session keys of an authenticated connection, and the records sealed with them.
//!
//! Both sides derive one key per direction from the job's secret and the nonces of their handshake
//! (HKDF-SHA256, RFC 5869). A record is sealed with AES-256-GCM (NIST SP 800-38D):
//!
//! ```text
//! length of the plaintext, 4 bytes + tag of 16 bytes
//! plaintext, encrypted             + tag of 16 bytes
//! ```
//!
//! The length has its own tag: a changed length is detected at once, instead of after waiting for
//! bytes that never come. The nonce of each tag is the number of tags before it under the same key,
//! so that a record that is repeated, left out or moved fails as an altered one does. After
//! [`TAGS_PER_KEY`] tags both sides replace the key by one derived from it, long before AES-GCM's
//! margin for a single key is used up.

use crate::secret::{PROOF, Secret};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf;
use std::fmt;

/// Bytes of a tag.
pub(crate) const TAG: usize = 16;
/// Bytes of a sealed length.
pub(crate) const RECORD_HEAD: usize = 4 + TAG;
/// Tags under one key; even, because a record has two. With records of 16 KiB a key seals 8 GiB, 2^29
/// blocks: by the birthday bound on AES's blocks it is distinguishable from random with a probability
/// below 2^-68.
const TAGS_PER_KEY: u64 = 1 << 20;

/// Side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The side that connected.
    Peer,
    /// The side that listened.
    Listener,
}

/// Keys of both directions of a connection.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

/// A record's tag is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Altered;

impl Session {
    /// Derives the keys of `side` from the secret and the nonces of the handshake.
    pub(crate) fn new(
        secret: &Secret,
        side: Side,
        peer: &[u8; PROOF],
        listener: &[u8; PROOF],
    ) -> Self {
        let extracted = secret.extract(&[peer.as_slice(), listener].concat());
        let from_peer = Key::new(expand(&extracted, b"paceline records from the peer"));
        let from_listener = Key::new(expand(&extracted, b"paceline records from the listener"));
        let (out, inward) = match side {
            Side::Peer => (from_peer, from_listener),
            Side::Listener => (from_listener, from_peer),
        };
        Self { sealer: Sealer(out), opener: Opener(inward) }
    }
}

/// Seals the records of one direction.
#[derive(Debug)]
pub(crate) struct Sealer(Key);

impl Sealer {
    /// Appends a record of `pieces` to `out`.
    pub(crate) fn seal<'p>(
        &mut self,
        pieces: impl IntoIterator<Item = &'p [u8]>,
        out: &mut Vec<u8>,
    ) {
        let head = out.len();
        out.resize(head + RECORD_HEAD, 0);
        let body = out.len();
        pieces.into_iter().for_each(|piece| out.extend_from_slice(piece));
        let length = (out.len() - body) as u32;
        out[head..head + 4].copy_from_slice(&length.to_le_bytes());
        for part in [head..head + 4, body..out.len()] {
            let nonce = self.0.next_nonce();
            // It fails only beyond AES-GCM's 64 GiB per tag; a length of 32 bits is below.
            let tag = (self.0.key)
                .seal_in_place_separate_tag(nonce, Aad::empty(), &mut out[part.clone()])
                .unwrap_or_else(|_| unreachable!("a record is shorter than AES-GCM's limit"));
            if part.start == head {
                out[head + 4..body].copy_from_slice(tag.as_ref());
            } else {
                out.extend_from_slice(tag.as_ref());
            }
        }
    }
}

/// Opens the records of one direction.
#[derive(Debug)]
pub(crate) struct Opener(Key);

impl Opener {
    /// Checks and decrypts a sealed length; returns the number of bytes that the rest of the record
    /// has, with its tag.
    pub(crate) fn head(&mut self, sealed: &mut [u8; RECORD_HEAD]) -> Result<usize, Altered> {
        let length = self.open(sealed)?.first_chunk().copied().ok_or(Altered)?;
        Ok(u32::from_le_bytes(length) as usize + TAG)
    }

    /// Checks the rest of a record and decrypts it to `into`, which has the plaintext's length.
    pub(crate) fn body_into(&mut self, sealed: &[u8], into: &mut [u8]) -> Result<(), Altered> {
        let (text, tag) = sealed.split_at_checked(into.len()).ok_or(Altered)?;
        let nonce = self.0.next_nonce();
        self.0.key.open_separate_gather(nonce, Aad::empty(), text, tag, into).map_err(|_| Altered)
    }

    /// Checks and decrypts the rest of a record in place.
    pub(crate) fn body<'b>(&mut self, sealed: &'b mut [u8]) -> Result<&'b [u8], Altered> {
        self.open(sealed).map(|plain| &*plain)
    }

    fn open<'b>(&mut self, sealed: &'b mut [u8]) -> Result<&'b mut [u8], Altered> {
        let nonce = self.0.next_nonce();
        self.0.key.open_in_place(nonce, Aad::empty(), sealed).map_err(|_| Altered)
    }
}

/// Key of one direction, and the number of tags made with it.
struct Key {
    key: LessSafeKey,
    /// The next key is derived from it.
    chain: [u8; PROOF],
    tags: u64,
}

impl Key {
    fn new(chain: [u8; PROOF]) -> Self {
        let key = expand(&pseudorandom(&chain), b"paceline key");
        let key = UnboundKey::new(&AES_256_GCM, &key)
            .unwrap_or_else(|_| unreachable!("AES-256 has keys of 32 bytes"));
        Self { key: LessSafeKey::new(key), chain, tags: 0 }
    }

    fn next_nonce(&mut self) -> Nonce {
        if self.tags == TAGS_PER_KEY {
            *self = Self::new(expand(&pseudorandom(&self.chain), b"paceline next chain"));
        }
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&self.tags.to_le_bytes());
        self.tags += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(…, {} tags)", self.tags)
    }
}

fn pseudorandom(chain: &[u8; PROOF]) -> hkdf::Prk {
    hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, chain)
}

/// Expands extracted randomness to 32 bytes for the use that `info` names.
pub(crate) fn expand(extracted: &hkdf::Prk, info: &[u8]) -> [u8; PROOF] {
    let mut bytes = [0; PROOF];
    extracted
        .expand(&[info], hkdf::HKDF_SHA256)
        .and_then(|expanded| expanded.fill(&mut bytes))
        .unwrap_or_else(|_| unreachable!("HKDF-SHA256 expands to 32 bytes"));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends of a connection.
    fn pair() -> (Session, Session) {
        let secret = Secret::from_text("the secret of these tests").unwrap();
        let side = |side| Session::new(&secret, side, &[1; PROOF], &[2; PROOF]);
        (side(Side::Peer), side(Side::Listener))
    }

    fn open(opener: &mut Opener, record: &[u8]) -> Result<Vec<u8>, Altered> {
        let mut record = record.to_vec();
        let (head, body) = record.split_first_chunk_mut().unwrap();
        let length = opener.head(head)?;
        assert_eq!(length, body.len());
        opener.body(body).map(<[u8]>::to_vec)
    }

    fn seal(sealer: &mut Sealer, plain: &[u8]) -> Vec<u8> {
        let mut record = Vec::new();
        sealer.seal([plain], &mut record);
        record
    }

    #[test]
    fn expansion_is_the_one_of_rfc_5869() {
        // Test case 1: the HKDF under the keys.
        let salt: Vec<u8> = (0..13).collect();
        let info: Vec<u8> = (0xf0..=0xf9).collect();
        let extracted = hkdf::Salt::new(hkdf::HKDF_SHA256, &salt).extract(&[0x0b; 22]);
        let hex: String =
            expand(&extracted, &info).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
    }

    #[test]
    fn records_arrive_in_both_directions() {
        let (mut a, mut b) = pair();
        for plain in [b"".as_slice(), b"one", &[7; 70_000]] {
            let record = seal(&mut a.sealer, plain);
            assert_eq!(record.len(), RECORD_HEAD + plain.len() + TAG);
            assert_eq!(open(&mut b.opener, &record).unwrap(), plain);
            let record = seal(&mut b.sealer, plain);
            assert_eq!(open(&mut a.opener, &record).unwrap(), plain);
        }
    }

    #[test]
    fn every_altered_bit_is_detected() {
        let (mut a, _) = pair();
        let record = seal(&mut a.sealer, b"gradients");
        for at in 0..record.len() {
            for bit in 0..8 {
                let mut altered = record.clone();
                altered[at] ^= 1 << bit;
                assert_eq!(open(&mut pair().1.opener, &altered), Err(Altered), "byte {at}");
            }
        }
        assert_eq!(open(&mut pair().1.opener, &record).unwrap(), b"gradients");
    }

    #[test]
    fn repeated_moved_and_reflected_records_are_detected() {
        let (mut a, mut b) = pair();
        let [first, second] = [b"first", b"other"].map(|plain| seal(&mut a.sealer, plain));
        assert_eq!(open(&mut pair().1.opener, &second), Err(Altered), "one left out");
        assert_eq!(open(&mut pair().0.opener, &first), Err(Altered), "sent back");
        assert_eq!(open(&mut b.opener, &first).unwrap(), b"first");
        assert_eq!(open(&mut b.opener, &first), Err(Altered), "repeated");
    }

    #[test]
    fn other_secrets_and_nonces_give_other_keys() {
        let record = seal(&mut pair().0.sealer, b"x");
        let secret = Secret::from_text("the secret of these tests").unwrap();
        let other = Secret::from_text("another secret of these tests").unwrap();
        for mut session in [
            Session::new(&other, Side::Listener, &[1; PROOF], &[2; PROOF]),
            Session::new(&secret, Side::Listener, &[1; PROOF], &[3; PROOF]),
            Session::new(&secret, Side::Listener, &[3; PROOF], &[2; PROOF]),
        ] {
            assert_eq!(open(&mut session.opener, &record), Err(Altered));
        }
    }

    #[test]
    fn keys_are_replaced_on_both_sides_alike() {
        let (mut a, mut b) = pair();
        let chain = a.sealer.0.chain;
        for number in 0..TAGS_PER_KEY / 2 + 2 {
            let plain = number.to_le_bytes();
            let record = seal(&mut a.sealer, &plain);
            assert_eq!(open(&mut b.opener, &record).unwrap(), plain);
        }
        assert_ne!(a.sealer.0.chain, chain);
        assert_eq!(a.sealer.0.tags, 4);
        assert!(!format!("{a:?}").contains(&format!("{:?}", &chain[..4])));
    }
}
