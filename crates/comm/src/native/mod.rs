//! Native communicators: groups whose operations a library (NCCL, MPI) performs.
//!
//! A [`NativeWorld`] makes the communicators of a rank's groups, and a [`Communicator`] starts
//! operations on them. Buffers, queues and requests are the library's own types: host memory and
//! requests for MPI, device memory and streams for NCCL.

pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;

use crate::error::CommError;
use paceline_plan::collective::{Algorithm, CollectiveKind, Method, Reduction};
use paceline_plan::dtype::DType;
use paceline_plan::ids::{GroupId, Rank};
use paceline_plan::program::{Call, Op, Plan};
use std::collections::{BTreeMap, BTreeSet};

/// One rank's side of a group of a library.
///
/// All members start the same collectives in the same order, and the messages between two members
/// match in the order in which they were started. Once any rank of the world has failed, every call
/// returns [`CommError::Failed`] with that rank's name.
pub trait Communicator: Send {
    /// Memory of a vector. It stays valid, and untouched by others, until the operation is done.
    type Buffer;
    /// Queue on which an operation runs: a stream of a device, or nothing.
    type Queue;
    /// Handle of an operation in flight.
    type Request;

    /// Starts an operation, without waiting, after the work that is already on its queue.
    ///
    /// [`paceline_plan::collective`] defines the contents of the buffers at the start and at the
    /// end: `data` is the work buffer, `output` the output buffer of the kinds that have one. Parts are equal. The order of summation is the library's.
    fn start(
        &mut self,
        op: &NativeOp,
        dtype: DType,
        data: Self::Buffer,
        output: Option<Self::Buffer>,
        on: &Self::Queue,
    ) -> Result<Self::Request, CommError>;

    /// Returns true once the operation is done, or, if it runs on a queue, once work that is added
    /// to the queue runs after it. Never waits.
    fn test(&mut self, request: &mut Self::Request) -> Result<bool, CommError>;

    /// Ends the operations in flight, and tells every rank of the world that this one cannot
    /// continue. The first failure counts.
    fn abort(&mut self, reason: &str);
}

/// Operation of a native communicator. Peers and the root are indices within the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NativeOp {
    /// A collective of all members.
    Collective {
        /// Kind of the collective.
        kind: CollectiveKind,
        /// Reduction that combines contributions, for kinds that reduce.
        reduction: Reduction,
        /// The root, for kinds that have one.
        root: u32,
        /// Algorithm that the plan makes the library use; otherwise it chooses by itself.
        forced: Option<Algorithm>,
    },
    /// Sends the vector to a member.
    Send {
        /// The receiver.
        to: u32,
    },
    /// Receives the vector from a member.
    Recv {
        /// The sender.
        from: u32,
    },
}

impl NativeOp {
    /// Operation of a planned collective; `None` if the plan's own steps carry it out.
    pub fn of(call: &Call) -> Option<Self> {
        match call.method {
            Method::Library { library: _, forced } => {
                let Call { kind, reduction, root, .. } = *call;
                Some(Self::Collective { kind, reduction, root, forced })
            }
            Method::Steps(_) => None,
        }
    }
}

/// One rank's side of a world that a library has joined.
pub trait NativeWorld {
    /// Communicators of its groups.
    type Communicator: Communicator;

    /// Makes the communicator of a group with these members, in the group's order; `None` for a
    /// rank that is in none of the groups made by this call.
    ///
    /// All ranks of the world make the same calls in the same order, each with the members of its
    /// own group: the groups of one call are disjoint (`MPI_Comm_split`).
    fn group(&mut self, members: &[Rank]) -> Result<Option<Self::Communicator>, CommError>;
}

/// Groups whose collectives a library carries out, each with the name of its lane: collectives of
/// different lanes run at once, in an order of their own, and each lane needs its own communicator.
///
/// The order is the same on all ranks, and contains groups of other roles.
pub fn groups(plan: &Plan) -> BTreeSet<(GroupId, &str)> {
    let sections = plan.programs.iter().flat_map(|program| {
        let sections = [&program.prologue, &program.body, &program.epilogue];
        sections
            .into_iter()
            .flat_map(move |section| section.nodes.iter().map(move |n| (program, n)))
    });
    let native = sections.filter_map(|(program, node)| match node.op {
        Op::Collective { call, .. } => NativeOp::of(program.call(call))
            .map(|_| (program.call(call).group, program.lanes[node.lane.index()].as_str())),
        _ => None,
    });
    native.collect()
}

/// Communicators of one rank, by group and lane.
pub type Groups<'p, C> = BTreeMap<(GroupId, &'p str), C>;

/// Makes the communicators of a rank for all native collectives of a plan. All ranks of the world
/// call this at once.
pub fn join_groups<'p, W: NativeWorld>(
    world: &mut W,
    plan: &'p Plan,
    me: Rank,
) -> Result<Groups<'p, W::Communicator>, CommError> {
    let mut joined = Groups::new();
    for (group, lane) in groups(plan) {
        let mut members = plan.mesh.members(plan.group(group), me);
        if !members.contains(&me) {
            members.clear();
        }
        if let Some(communicator) = world.group(&members)? {
            joined.insert((group, lane), communicator);
        }
    }
    Ok(joined)
}
