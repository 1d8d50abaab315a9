//! Whatever comes over a wire is refused, or means what was written: what a head is decoded to is
//! encoded to a head that means the same, and a stream of anything never makes a receiver panic, nor a
//! hub that is told anything.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_comm::{rendezvous, wire};

fuzz_target!(|bytes: &[u8]| {
    if let Some(head) = bytes.first_chunk::<{ wire::HEAD }>()
        && let Ok(wire::Frame::Message { header, payload }) = wire::decode(head)
    {
        let again = wire::decode(&wire::encode(&header, payload));
        assert_eq!(again, Ok(wire::Frame::Message { header, payload }));
    }
    wire::drain(bytes);
    rendezvous::understood(bytes);
});
