//! Typed indices: a rank is not a stage, a microbatch is not a layer.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The index as an array position.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl From<usize> for $name {
            /// Panics if the index does not fit; only a plan too large for memory can cause this.
            fn from(index: usize) -> Self {
                Self(<$inner>::try_from(index).expect(concat!(stringify!($name), " index too large")))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index!(
    /// One process (or thread) of the world.
    Rank, u32);
index!(
    /// A position along the pipeline axis: the ranks that hold the same layers.
    StageRank, u16);
index!(
    /// A virtual stage: consecutive layers. With an interleaved schedule a pipeline rank holds
    /// several.
    Stage, u16);
index!(
    /// A microbatch of one data-parallel replica, counted within an iteration.
    Microbatch, u32);
index!(
    /// A layer of the model, in forward order.
    LayerId, u32);
index!(
    /// A tensor of one layer's graph.
    TensorId, u32);
index!(
    /// A parameter of one layer's graph.
    ParamId, u32);
index!(
    /// A buffer of a program.
    BufferId, u32);
index!(
    /// A segment of a program, run by a compute op.
    SegmentId, u32);
index!(
    /// A declared collective of a program.
    CallId, u32);
index!(
    /// A group of ranks declared by the plan.
    GroupId, u16);
index!(
    /// A lane of a program.
    LaneId, u8);
index!(
    /// An op of a program's section, in plan order.
    OpId, u32);
index!(
    /// Index of the copy of a replicated buffer that an op uses.
    Slot, u16);
index!(
    /// A role: all ranks of a role run the same program.
    RoleId, u32);
