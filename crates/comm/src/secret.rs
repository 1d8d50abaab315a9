//! Secret of a job, and the proof of knowing it.
//!
//! Each side of a connection sends a fresh random nonce. It proves that it knows the secret by an
//! HMAC-SHA256 (RFC 2104, FIPS 180-4) over the other side's nonce. The secret itself is never sent,
//! and a recorded proof is worthless for another connection. Each side's proof has its own label,
//! so that neither can be replayed to its author. Data after the handshake is not signed; a hostile
//! network needs a tunnel.

use crate::error::CommError;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;

/// Bytes of a nonce and of a proof.
pub(crate) const PROOF: usize = 32;

/// Secret known only to the ranks of a job. Never printed, not even by `{:?}`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Creates a new secret, for a launcher to pass to the ranks it starts.
    pub fn random() -> Result<Self, CommError> {
        let bytes = nonce()?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Parses a secret from a file or variable; rejects short ones, which could be guessed.
    pub fn from_text(text: &str) -> Result<Self, CommError> {
        const SHORTEST: usize = 16;
        let text = text.trim();
        if text.len() < SHORTEST {
            let problem = format!(
                "the job's secret has {} characters; at least {SHORTEST} are needed",
                text.len()
            );
            return Err(CommError::Job { problem });
        }
        Ok(Self(text.to_owned()))
    }

    /// Returns the secret in the form that [`from_text`](Self::from_text) accepts, to pass it to a
    /// rank. Callers must keep it out of command lines and logs.
    pub fn as_text(&self) -> &str {
        &self.0
    }

    /// Computes the proof for a label and the exchanged data.
    pub(crate) fn prove(&self, label: &str, said: &[&[u8]]) -> [u8; PROOF] {
        self.mac(label, said).finalize().into_bytes().into()
    }

    /// Returns true if a proof is correct, in constant time.
    pub(crate) fn verify(&self, label: &str, said: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(label, said).verify_slice(proof).is_ok()
    }

    fn mac(&self, label: &str, said: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC takes keys of any length; the type does not express that.
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.as_bytes())
            .unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        for part in [label.as_bytes()].iter().chain(said) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Random bytes from the system.
pub(crate) fn nonce() -> Result<[u8; PROOF], CommError> {
    let mut bytes = [0; PROOF];
    let mut filled = 0;
    while filled < PROOF {
        let rest = &mut bytes[filled..];
        match rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                let problem = format!("the system gives no random numbers: {error}");
                return Err(CommError::Job { problem });
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hmac_is_the_one_of_rfc_4231() {
        // Test case 2: the HMAC under the proofs, without our label and lengths.
        let mut mac = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        mac.update(b"what do ya want for nothing?");
        let hex: String =
            mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn proofs_hold_for_exactly_what_was_said() {
        let secret = Secret::from_text("a secret of a job").unwrap();
        let proof = secret.prove("client", &[b"ab", b"c"]);
        assert!(secret.verify("client", &[b"ab", b"c"], &proof));
        assert!(!secret.verify("server", &[b"ab", b"c"], &proof), "the label counts");
        assert!(!secret.verify("client", &[b"a", b"bc"], &proof), "the division counts");
        assert!(!secret.verify("client", &[b"ab", b"c"], &proof[..31]));
        let other = Secret::from_text("another secret, of the same job").unwrap();
        assert!(!other.verify("client", &[b"ab", b"c"], &proof));
    }

    #[test]
    fn secrets_are_long_unprintable_and_survive_as_text() {
        assert!(Secret::from_text("short\n").is_err());
        let secret = Secret::random().unwrap();
        assert_ne!(secret, Secret::random().unwrap());
        let text = secret.as_text();
        assert_eq!(text.len(), 64);
        assert!(!format!("{secret:?}").contains(&text[..8]));
        assert_eq!(Secret::from_text(&format!("{text}\n")).unwrap(), secret);
    }
}
