//! Bytes that a socket takes where they lie.
//!
//! What is written to a socket is copied into the system's memory and from there to the receiver's. Pages
//! can instead be handed over as they are, through a pipe that holds references to them (`vmsplice` and
//! `splice`): within a host the receiver's copy is then the only one, and across hosts a network card
//! reads them itself. What it costs is a promise: until the receiver has them, the bytes stay as they are.

use rustix::io::Errno;
use rustix::pipe::{
    IoSliceRaw, PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice, vmsplice,
};
use std::os::fd::{AsFd, OwnedFd};

/// How much is handed over at once; a user may have a hundred pipes of this size before a system keeps
/// them smaller.
const CAPACITY: usize = 512 << 10;
/// How many places can be handed over at once, at most.
const PLACES: usize = 16;

/// A way into one socket.
#[derive(Debug)]
pub(crate) struct Chute {
    exit: OwnedFd,
    entry: OwnedFd,
    inside: usize,
}

impl Chute {
    /// Makes one, if the system lets it.
    pub(crate) fn new() -> Option<Self> {
        let (exit, entry) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
        // One that stays smaller takes more calls.
        let _ = fcntl_setpipe_size(&entry, CAPACITY);
        Some(Self { exit, entry, inside: 0 })
    }

    /// How many bytes have been put in and have not come out.
    pub(crate) fn inside(&self) -> usize {
        self.inside
    }

    /// Puts in what it holds of some bytes, from the first on.
    ///
    /// Whoever changes them before the receiver of the socket has them changes what it gets.
    pub(crate) fn put<'b>(&mut self, bytes: impl Iterator<Item = &'b [u8]>) -> Result<(), Errno> {
        let places: Vec<IoSliceRaw<'_>> = bytes.take(PLACES).map(IoSliceRaw::from_slice).collect();
        // SAFETY: the system only ever reads the pages, which it keeps for as long as it refers to them,
        // mapped here or not. They are not given away, so that this process goes on to use them; what
        // it writes to them too early reaches another process as other bytes, and nothing else.
        self.inside += unsafe { vmsplice(&self.entry, &places, SpliceFlags::NONBLOCK) }?;
        Ok(())
    }

    /// Lets out into the socket what that takes; how much. If more is to come, a packet that is not full
    /// waits for it.
    pub(crate) fn pass(&mut self, socket: impl AsFd, more: bool) -> Result<usize, Errno> {
        let more = if more { SpliceFlags::MORE } else { SpliceFlags::empty() };
        let flags = SpliceFlags::NONBLOCK | more;
        let passed = splice(&self.exit, None, socket, None, self.inside, flags)?;
        self.inside -= passed;
        Ok(passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn everything_arrives_in_order_however_it_lies() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i * 7 % 251) as u8).collect();
        let reader = std::thread::spawn(move || {
            let mut found = Vec::new();
            far.read_to_end(&mut found).unwrap();
            found
        });
        let mut chute = Chute::new().unwrap();
        // Pieces that neither begin nor end where pages do.
        let cuts = [0, 1, 4095, 70_000, 1_500_003, bytes.len()];
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
        let mut gone = 0;
        while gone < bytes.len() {
            if chute.inside() == 0 {
                let mut skip = gone;
                let rest = pieces.iter().filter_map(|piece| {
                    let skipped = skip.min(piece.len());
                    skip -= skipped;
                    Some(&piece[skipped..]).filter(|rest| !rest.is_empty())
                });
                chute.put(rest).unwrap();
                assert!(chute.inside() > 0);
            }
            match chute.pass(&socket, gone + chute.inside() < bytes.len()) {
                Ok(n) => gone += n,
                Err(error) => {
                    assert_eq!(error, Errno::AGAIN);
                    std::thread::yield_now();
                }
            }
        }
        drop(socket);
        assert!(reader.join().unwrap() == bytes);
    }
}
