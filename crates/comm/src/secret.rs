//! Secret of a job, and the proof of knowing it.
//!
//! Each side of a connection sends a fresh random nonce. It proves that it knows the secret by an
//! HMAC-SHA256 (RFC 2104, FIPS 180-4) over the other side's nonce. The secret itself is never sent,
//! and a recorded proof is worthless for another connection. Each side's proof has its own label,
//! so that neither can be replayed to its author. The keys of what follows are derived from the
//! secret and both nonces, in [`session`](crate::session).

use crate::error::CommError;
use crate::session::expand;
use aws_lc_rs::{hkdf, hmac};
use std::fmt;

/// Bytes of a nonce and of a proof.
pub(crate) const PROOF: usize = 32;

/// Secret known only to the ranks of a job. Never printed, not even by `{:?}`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Creates a new secret, for a launcher to pass to the ranks it starts.
    pub fn random() -> Result<Self, CommError> {
        Ok(Self::from_bytes(&nonce()?))
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

    /// Derives the secret of a job from a secret of longer life: ranks that know both need no other
    /// exchange, and what one job reveals is of no use in another.
    pub fn for_job(&self, job: &str) -> Self {
        self.derive("paceline job", job.as_bytes())
    }

    /// Returns the secret in the form that [`from_text`](Self::from_text) accepts, to pass it to a
    /// rank. Callers must keep it out of command lines and logs.
    pub fn as_text(&self) -> &str {
        &self.0
    }

    /// Secret that only holders of this one can derive, for the use and the context named.
    pub(crate) fn derive(&self, label: &str, context: &[u8]) -> Self {
        Self::from_bytes(&expand(&self.extract(context), label.as_bytes()))
    }

    /// Extracts randomness for keys (HKDF, RFC 5869) with the salt of a connection or a job.
    pub(crate) fn extract(&self, salt: &[u8]) -> hkdf::Prk {
        hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(self.0.as_bytes())
    }

    /// Computes the proof for a label and the exchanged data.
    pub(crate) fn prove(&self, label: &str, said: &[&[u8]]) -> [u8; PROOF] {
        let mut proof = [0; PROOF];
        proof.copy_from_slice(hmac::sign(&self.key(), &message(label, said)).as_ref());
        proof
    }

    /// Returns true if a proof is correct, in constant time.
    pub(crate) fn verify(&self, label: &str, said: &[&[u8]], proof: &[u8]) -> bool {
        hmac::verify(&self.key(), &message(label, said), proof).is_ok()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, self.0.as_bytes())
    }

    fn from_bytes(bytes: &[u8; PROOF]) -> Self {
        Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// Encodes a label and data, each with its length, so that the division counts.
fn message(label: &str, said: &[&[u8]]) -> Vec<u8> {
    let mut message = Vec::new();
    for part in [label.as_bytes()].iter().chain(said) {
        message.extend((part.len() as u64).to_le_bytes());
        message.extend_from_slice(part);
    }
    message
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
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"Jefe");
        let proof = hmac::sign(&key, b"what do ya want for nothing?");
        let hex: String = proof.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
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
        assert_ne!(secret.derive("data", b"job 1"), secret.derive("data", b"job 2"));
        assert_ne!(secret.derive("data", b"job 1"), secret.derive("other", b"job 1"));
        assert_eq!(secret.derive("data", b"job 1"), secret.clone().derive("data", b"job 1"));
        assert!(!other.verify("client", &[b"ab", b"c"], &proof));
    }

    #[test]
    fn jobs_have_secrets_of_their_own() {
        let secret = Secret::from_text("a secret of a user").unwrap();
        assert_eq!(secret.for_job("7.0"), secret.for_job("7.0"));
        assert_ne!(secret.for_job("7.0"), secret.for_job("7.1"));
        assert_eq!(secret.for_job("7.0").as_text().len(), 64);
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
