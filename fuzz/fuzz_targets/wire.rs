//! Whatever comes over a wire is refused, or means what was written: what a head is decoded to is
//! encoded to a head that means the same, and a stream of anything never makes a receiver panic, nor a
//! hub that is told anything.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_comm::{rendezvous, wire};

fuzz_target!(|bytes: &[u8]| {
    if let Some(head) = bytes.first_chunk::<{ wire::HEAD }>()
        && let Ok(message @ wire::Frame::Message { header, payload, in_place }) = wire::decode(head)
    {
        let again = wire::decode(&wire::encode(&header, payload, in_place));
        assert_eq!(again, Ok(message));
    }
    wire::drain(bytes);
    rendezvous::understood(bytes);
});
