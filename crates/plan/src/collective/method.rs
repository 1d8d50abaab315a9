//! Method of a collective: the plan's own steps, or a communication library.

use super::resolve::resolve;
use super::{Algorithm, CollectiveError, CollectiveKind, Fabric, NameError, Pattern};
use super::{SummationOrder, chunk_range};
use crate::dtype::DType;
use crate::ids::Rank;
use crate::mesh::{GroupKind, Mesh};
use crate::program::{Call, Plan};
use crate::units::Bytes;
use std::fmt;
use std::str::FromStr;

/// Method of a collective. The plan decides it; no engine replaces it by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Method {
    /// The steps of an algorithm; never those of [`Algorithm::Auto`].
    Steps(Algorithm),
    /// A call to a communication library.
    Library {
        /// The library.
        library: Library,
        /// Algorithm that the library is told to use; otherwise it chooses by itself.
        forced: Option<Algorithm>,
    },
}

/// Communication library with collectives of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Library {
    /// NVIDIA's, between GPUs.
    Nccl,
    /// An implementation of the Message Passing Interface.
    Mpi,
}

impl Library {
    /// All libraries.
    pub const ALL: [Self; 2] = [Self::Nccl, Self::Mpi];

    /// Name in the text form and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::Mpi => "mpi",
        }
    }

    /// Returns true if the library can sum elements of the type: MPI has no 16-bit floats.
    pub const fn sums(self, dtype: DType) -> bool {
        match self {
            Self::Nccl => true,
            Self::Mpi => matches!(dtype, DType::F32 | DType::U32),
        }
    }

    /// Returns true if the library can be told to use the algorithm for a kind. NCCL has rings
    /// (`NCCL_ALGO=Ring`) for all kinds but those it makes of sends and receives; MPI has no
    /// portable way to be told.
    pub const fn has(self, algorithm: Algorithm, kind: CollectiveKind) -> bool {
        match (self, algorithm) {
            (Self::Nccl, Algorithm::Ring) => {
                matches!(
                    kind,
                    CollectiveKind::AllReduce
                        | CollectiveKind::ReduceScatter
                        | CollectiveKind::AllGather
                        | CollectiveKind::Broadcast
                        | CollectiveKind::Reduce
                )
            }
            _ => false,
        }
    }
}

/// A collective for which a method is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Kind of collective.
    pub kind: CollectiveKind,
    /// Requested algorithm, or [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// Order of summation.
    pub order: SummationOrder,
    /// Number of elements of the whole vector.
    pub elements: u64,
    /// Bytes of an element.
    pub element: Bytes,
    /// Type of the elements; `None` for bytes of any.
    pub dtype: Option<DType>,
    /// Parts are split at multiples of this number of elements.
    pub block: u64,
}

impl Ask {
    fn of(call: &Call, algorithm: Algorithm) -> Self {
        let Call { kind, order, block, dtype, .. } = *call;
        let (elements, element) = (call.elements(), Bytes(dtype.size()));
        Self { kind, algorithm, order, elements, element, dtype: Some(dtype), block }
    }

    /// Returns true if a library's call can express the parts: all have the same size, or the kind
    /// has none. Ranks that gather at a root do not know each other's parts and send them.
    fn has_equal_parts(&self, ranks: u32) -> bool {
        match self.kind {
            CollectiveKind::ReduceScatter
            | CollectiveKind::AllGather
            | CollectiveKind::AllToAll => {
                let part = |index| chunk_range(self.elements, ranks, index, self.block);
                let length = |index| part(index).end - part(index).start;
                length(0) == length(ranks - 1)
            }
            CollectiveKind::AllReduce
            | CollectiveKind::Broadcast
            | CollectiveKind::Reduce
            | CollectiveKind::Gather
            | CollectiveKind::Scatter
            | CollectiveKind::SendRecv
            | CollectiveKind::Barrier => true,
        }
    }
}

impl Fabric {
    /// Decides the method of every call of a plan.
    pub fn decide(&self, plan: &mut Plan) {
        // MPI's messages are a transport; NCCL's run on streams like its collectives.
        plan.messages = self.library.filter(|library| *library == Library::Nccl);
        let Plan { programs, groups, mesh, strategy, .. } = plan;
        // Most calls of a plan are alike, and timing many algorithms takes long.
        let mut known: Vec<(GroupKind, Ask, Method)> = Vec::new();
        for call in programs.iter_mut().flat_map(|program| &mut program.calls) {
            let group = groups[call.group.index()];
            // Only the exchange of gradients is the user's to choose.
            let algorithm =
                if group == GroupKind::Replicas { strategy.collective } else { Algorithm::Auto };
            let ask = Ask::of(call, algorithm);
            let same = known.iter().find(|(of, like, _)| (*of, *like) == (group, ask));
            call.method = match same {
                Some((.., method)) => *method,
                None => {
                    let method = self.method(mesh, group, &ask);
                    known.push((group, ask, method));
                    method
                }
            };
        }
    }

    /// Chooses the method of a collective of every group of a kind, in this order:
    ///
    /// 1. The requested algorithm where it applies: forced on the library if the library has it and
    ///    the order is free, otherwise by its steps.
    /// 2. The library, if there is one, for equal parts and in free order or without sums. What the
    ///    library [cannot sum](Library::sums) is left to steps.
    /// 3. Shared memory inside shm domains, for kinds whose members all stay until the end, in
    ///    canonical order or without sums.
    /// 4. The fastest algorithm by the fabric's [times](super::CollectiveTimes).
    pub fn method(&self, mesh: &Mesh, group: GroupKind, ask: &Ask) -> Method {
        let Ask { kind, algorithm, order, .. } = *ask;
        let ranks = mesh.group_size(group);
        let any_order = order == SummationOrder::Free || !kind.reduces();
        let equal = ask.has_equal_parts(ranks);
        let library = self.library.filter(|library| {
            let sums = !kind.reduces() || ask.dtype.is_none_or(|dtype| library.sums(dtype));
            ranks > 1 && any_order && equal && sums
        });
        if algorithm != Algorithm::Auto
            && let Ok(named) = resolve(kind, algorithm, ranks, order)
        {
            return match library.filter(|library| library.has(named, kind)) {
                Some(library) => Method::Library { library, forced: Some(named) },
                None => Method::Steps(named),
            };
        }
        if let Some(library) = library {
            return Method::Library { library, forced: None };
        }
        let stays = match kind {
            CollectiveKind::AllReduce
            | CollectiveKind::ReduceScatter
            | CollectiveKind::AllGather
            | CollectiveKind::AllToAll => true,
            // A rank may leave these before the others are done, but a lender must stay.
            CollectiveKind::Broadcast
            | CollectiveKind::Reduce
            | CollectiveKind::Gather
            | CollectiveKind::Scatter
            | CollectiveKind::SendRecv
            | CollectiveKind::Barrier => false,
        };
        let fixed = order == SummationOrder::Canonical || !kind.reduces();
        if ranks > 1 && stays && fixed && self.share_memory(mesh, group) {
            return Method::Steps(Algorithm::SharedMemory);
        }
        // All groups of a kind get the same method: that of the first.
        let first = match group {
            GroupKind::Axis(_) | GroupKind::Replicas | GroupKind::Ends => 0,
            GroupKind::Served(server) => mesh.size() + server,
            GroupKind::Servers => mesh.size(),
        };
        Method::Steps(self.fastest(&mesh.members(group, Rank(first)), ask))
    }
}

impl Method {
    /// The library that carries the collective out.
    pub const fn library(self) -> Option<Library> {
        match self {
            Self::Steps(_) => None,
            Self::Library { library, .. } => Some(library),
        }
    }

    /// Pattern of the collective. For a library it has the steps of the forced or of the cheapest
    /// algorithm, which stand for the call where a model needs messages.
    pub fn pattern(
        self,
        kind: CollectiveKind,
        order: SummationOrder,
        ranks: u32,
        root: u32,
    ) -> Result<Pattern, CollectiveError> {
        let algorithm = match self {
            Self::Steps(algorithm) => algorithm,
            Self::Library { forced, .. } => forced.unwrap_or(Algorithm::Auto),
        };
        Pattern::new(kind, algorithm, order, ranks, root)
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Library {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let found = Self::ALL.into_iter().find(|library| library.name() == text);
        let needs = "a library: nccl or mpi";
        found.ok_or_else(|| NameError::Parameter { text: text.to_owned(), needs })
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(algorithm) => algorithm.fmt(f),
            Self::Library { library, forced: None } => library.fmt(f),
            Self::Library { library, forced: Some(forced) } => {
                f.pad(&format!("{library}:{forced}"))
            }
        }
    }
}

impl FromStr for Method {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (name, forced) = match text.split_once(':') {
            Some((name, forced)) => (name, Some(forced)),
            None => (text, None),
        };
        match name.parse() {
            Ok(library) => {
                let forced = forced.map(str::parse).transpose()?;
                Ok(Self::Library { library, forced })
            }
            Err(_) => text.parse().map(Self::Steps),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Axis;
    use crate::strategy::Strategy;
    use CollectiveKind::{AllGather, AllReduce, Broadcast, Gather, ReduceScatter};
    use SummationOrder::{Canonical, Free};

    /// Two replicas of two tensor-parallel ranks.
    fn chosen(
        fabric: &Fabric,
        (kind, algorithm, order): (CollectiveKind, &str, SummationOrder),
        elements: u64,
    ) -> String {
        let mesh = Strategy { dp: 2, tp: 2, ..Strategy::default() }.mesh();
        let algorithm = algorithm.parse().unwrap();
        let ask =
            Ask { kind, algorithm, order, elements, element: Bytes(4), dtype: None, block: 1 };
        fabric.method(&mesh, GroupKind::Axis(Axis::Dp), &ask).to_string()
    }

    #[test]
    fn names_round_trip() {
        for text in ["ring", "hierarchical:ring:tree/4", "nccl", "nccl:ring", "mpi"] {
            assert_eq!(text.parse::<Method>().unwrap().to_string(), text);
        }
        assert!("nccl:".parse::<Method>().is_err());
        assert!("rccl".parse::<Method>().is_err());
    }

    #[test]
    fn a_named_algorithm_is_forced_on_a_library_that_has_it() {
        let nccl = Fabric { library: Some(Library::Nccl), ..Fabric::unknown() };
        assert_eq!(chosen(&nccl, (AllReduce, "ring", Free), 8), "nccl:ring");
        assert_eq!(chosen(&nccl, (AllReduce, "tree", Free), 8), "tree");
        assert_eq!(chosen(&nccl, (AllReduce, "direct", Canonical), 8), "direct");
        assert_eq!(chosen(&nccl, (Gather, "ring", Free), 8), "ring");
        assert_eq!(chosen(&nccl, (AllReduce, "auto", Free), 8), "nccl");
        assert_eq!(chosen(&nccl, (AllGather, "tree", Free), 8), "nccl", "a tree gathers nothing");
        let mpi = Fabric { library: Some(Library::Mpi), ..nccl };
        assert_eq!(chosen(&mpi, (AllReduce, "ring", Free), 8), "ring");
        assert_eq!(chosen(&mpi, (Broadcast, "auto", Canonical), 8), "mpi");
    }

    #[test]
    fn a_library_sums_in_any_order_and_has_equal_parts() {
        let nccl = Fabric { library: Some(Library::Nccl), ..Fabric::unknown() };
        assert_eq!(chosen(&nccl, (AllReduce, "auto", Canonical), 8), "halving-doubling");
        assert_eq!(chosen(&nccl, (AllGather, "auto", Canonical), 8), "nccl");
        assert_eq!(chosen(&nccl, (ReduceScatter, "auto", Free), 9), "halving-doubling");
        assert_eq!(chosen(&nccl, (AllReduce, "auto", Free), 9), "nccl");
    }

    #[test]
    fn mpi_leaves_sums_of_short_floats_to_steps() {
        let mpi = Fabric { library: Some(Library::Mpi), ..Fabric::unknown() };
        let mesh = Strategy { dp: 2, tp: 2, ..Strategy::default() }.mesh();
        let of = |kind, dtype| {
            let (algorithm, element) = (Algorithm::Auto, Bytes(dtype_size(dtype)));
            let ask = Ask { kind, algorithm, order: Free, elements: 8, element, dtype, block: 1 };
            mpi.method(&mesh, GroupKind::Axis(Axis::Dp), &ask).library()
        };
        fn dtype_size(dtype: Option<DType>) -> u64 {
            dtype.map_or(1, DType::size)
        }
        assert_eq!(of(AllReduce, Some(DType::Bf16)), None);
        assert_eq!(of(AllGather, Some(DType::Bf16)), Some(Library::Mpi));
        assert_eq!(of(AllReduce, Some(DType::F32)), Some(Library::Mpi));
    }

    #[test]
    fn groups_inside_a_domain_share_memory() {
        let within = |ranks| Fabric { shm_domain: Some(ranks), ..Fabric::unknown() };
        assert_eq!(chosen(&within(4), (AllReduce, "auto", Canonical), 8), "shared-memory");
        assert_eq!(chosen(&within(2), (AllReduce, "auto", Canonical), 8), "halving-doubling");
        assert_eq!(chosen(&within(4), (AllReduce, "auto", Free), 8), "halving-doubling");
        assert_eq!(chosen(&within(4), (AllReduce, "direct", Canonical), 8), "direct");
        assert_eq!(chosen(&within(4), (Broadcast, "auto", Canonical), 8), "direct");
    }
}
