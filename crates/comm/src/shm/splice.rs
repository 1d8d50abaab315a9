//! Zero-copy writes to sockets.
//!
//! Data written to a socket is copied into kernel memory and from there to the receiver. Instead,
//! pages can be handed over by reference, through a pipe (`vmsplice` and `splice`). Within a host
//! the receiver's copy is then the only one, and across hosts the network card reads the pages
//! itself. In return, the bytes must stay unchanged until the receiver has them.

use rustix::io::Errno;
use rustix::pipe::{
    IoSliceRaw, PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice, vmsplice,
};
use std::os::fd::{AsFd, OwnedFd};

/// Bytes handed over at once; a user may have a hundred pipes of this size before the system makes
/// them smaller.
const CAPACITY: usize = 512 << 10;
/// Maximum number of slices handed over at once.
const PLACES: usize = 16;

/// Pipe into one socket.
#[derive(Debug)]
pub(crate) struct SplicePipe {
    exit: OwnedFd,
    entry: OwnedFd,
    inside: usize,
}

impl SplicePipe {
    /// Creates a pipe, if the system allows it.
    pub(crate) fn new() -> Option<Self> {
        let (exit, entry) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
        // A smaller pipe only needs more calls.
        let _ = fcntl_setpipe_size(&entry, CAPACITY);
        Some(Self { exit, entry, inside: 0 })
    }

    /// Number of bytes put in that have not left the pipe.
    pub(crate) fn inside(&self) -> usize {
        self.inside
    }

    /// Puts in as many of the bytes as the pipe holds, from the first on.
    ///
    /// A change to them before the socket's receiver has them changes the data it receives.
    pub(crate) fn put<'b>(&mut self, bytes: impl Iterator<Item = &'b [u8]>) -> Result<(), Errno> {
        let places: Vec<IoSliceRaw<'_>> = bytes.take(PLACES).map(IoSliceRaw::from_slice).collect();
        // SAFETY: the system only reads the pages, and keeps them as long as it refers to them,
        // mapped here or not. They are not given away, so this process continues to use them. A
        // write that is too early only makes another process receive other bytes, and has no other
        // effect.
        self.inside += unsafe { vmsplice(&self.entry, &places, SpliceFlags::NONBLOCK) }?;
        Ok(())
    }

    /// Moves bytes from the pipe to the socket and returns their number. With `more`, an incomplete
    /// packet waits for the next bytes.
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
        let mut chute = SplicePipe::new().unwrap();
        // Pieces that neither begin nor end at page boundaries.
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
