//! Seam between the engine and a network: exchanges are posted, and their ends come back.

/// Network that carries the exchanges of a workload, each known by its op match.
pub(crate) trait Network {
    /// True if exchanges in flight share links; false if each takes the time that it takes alone.
    const SHARES_LINKS: bool;

    /// Starts an exchange, all of whose ops are ready at time `at`, which is not before the last
    /// end that [`Self::next`] returned. Ends that no other traffic can change may be answered at
    /// once.
    fn post(&mut self, posting: Posting<'_>, at: f64, done: &mut Vec<Completion>);

    /// Advances to the next end and returns it; `None` if none is due up to `until`.
    fn next(&mut self, until: f64) -> Option<Completion>;
}

/// Exchange that can start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posting<'a> {
    /// Number of its op match.
    pub(crate) op_match: u32,
    /// Ops of the match.
    pub(crate) ops: &'a [u32],
}

/// End of an op's part in an exchange.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Completion {
    /// Number of the op match.
    pub(crate) op_match: u32,
    /// Number of the op.
    pub(crate) op: u32,
    /// End time.
    pub(crate) at: f64,
}
