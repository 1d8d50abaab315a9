//! Deals a stage's parameters out to buckets: what is reduced, updated and gathered together.

use super::shard::ShardedLayer;
use super::tables::{self, Learn};
use crate::compress::Compression;
use crate::dtype::DType;
use crate::graph::{BLOCK, Graph, Param};
use crate::ids::{LayerId, ParamId};
use crate::program::Entry;
use crate::strategy::{Strategy, Zero};
use std::ops::Range;

/// A bucket before it has buffers.
#[derive(Clone, Debug)]
pub(super) struct BucketShape {
    pub(super) name: String,
    /// The layers whose backward pass fills it.
    pub(super) layers: Range<usize>,
    pub(super) entries: Vec<Entry>,
    /// The parameters that the entries are, in the same order.
    pub(super) owners: Vec<(LayerId, ParamId)>,
    /// Padded, so that every part that a rank owns is a whole number of blocks.
    pub(super) elements: u64,
    /// Leading elements whose gradients must be summed along the tensor-parallel axis.
    pub(super) partial: u64,
    /// Whether it is the embedding's table, which other layers use too.
    pub(super) tied: bool,
    /// Whether it holds experts that are held by other ranks than the rest of their layers.
    pub(super) experts: bool,
    /// Whether it holds tables, which are looked up: they do not enter the gradient's norm.
    pub(super) tables: bool,
    /// Whether it holds running averages and nothing else.
    pub(super) averages: bool,
}

impl BucketShape {
    /// The type in which layers read its weights.
    pub(super) fn dtype(&self, strategy: &Strategy) -> DType {
        if self.tables { DType::F32 } else { strategy.activation_dtype() }
    }
}

/// What dealing out needs to know.
pub(super) struct Deal<'a> {
    pub(super) graph: &'a Graph,
    pub(super) sharded: &'a [ShardedLayer],
    pub(super) strategy: &'a Strategy,
    /// Into how many parts a bucket is dealt out: replicas under ZeRO, or servers.
    pub(super) parts: u64,
    /// The same for a bucket of experts that are held apart.
    pub(super) expert_parts: u64,
}

impl Deal<'_> {
    /// The buckets of a run of layers, in the order in which the backward pass fills them. A tied table
    /// is a bucket of its own, and so are experts that other ranks hold, and running averages where replicas
    /// agree in a way that would not keep them averages; the last one are tables that have gradients.
    pub(super) fn buckets(&self, layers: Range<usize>) -> Vec<BucketShape> {
        let mut buckets = Vec::new();
        let mut end = layers.end;
        let mut size = 0;
        for layer in layers.clone().rev() {
            size += self.layer_elements(layer) * self.strategy.grad_dtype.size();
            let full = size >= self.strategy.bucket.0 || self.strategy.zero == Zero::Parameters;
            if size > 0 && (full || layer == layers.start) {
                if (layer..end).any(|layer| self.has_experts_apart(layer)) {
                    buckets.push(self.bucket(layer..end, Holds::Experts));
                }
                let averages = |(_, holds)| holds == Holds::Averages;
                if (layer..end).any(|layer| self.params(layer).any(averages)) {
                    buckets.push(self.bucket(layer..end, Holds::Averages));
                }
                buckets.push(self.bucket(layer..end, Holds::Rest));
                end = layer;
                size = 0;
            }
            if self.params(layer).any(|(_, holds)| holds == Holds::Tied) {
                // From the head on, all uses have one gradient.
                let first = self.graph.layer(LayerId::from(layer)).input.is_none();
                let known = buckets.iter().any(|bucket: &BucketShape| bucket.tied);
                if first || !known {
                    buckets.push(self.bucket(layer..layer + 1, Holds::Tied));
                }
            }
        }
        if tables::learn(self.strategy) != Learn::AtOnce {
            buckets.extend(self.tables(layers));
        }
        buckets
    }

    /// The tables of a run of layers, if there are any.
    pub(super) fn tables(&self, layers: Range<usize>) -> Option<BucketShape> {
        let layer = layers.into_iter().find(|&layer| {
            self.graph.layer(LayerId::from(layer)).params.iter().any(|param| param.sparse)
        })?;
        let params = self.graph.layer(LayerId::from(layer)).params.iter().enumerate();
        let sparse = params.filter(|(_, param)| param.sparse).map(|(i, _)| ParamId::from(i));
        let owners = sparse.map(|param| (LayerId::from(layer), param)).collect();
        Some(self.filled(layer..layer + 1, owners, Holds::Tables))
    }

    /// Each parameter of a layer but its tables, and the kind of bucket that holds it.
    fn params(&self, layer: usize) -> impl Iterator<Item = (ParamId, Holds)> {
        let params = &self.graph.layer(LayerId::from(layer)).params;
        let apart = self.strategy.experts_apart();
        let dense = params.iter().enumerate().filter(|(_, p)| !p.sparse && !p.borrowed);
        let averages_apart = averages_apart(self.strategy);
        dense.map(move |(i, p)| {
            let holds = match (p.tied, p.experts > 0 && apart) {
                (true, _) => Holds::Tied,
                (false, true) => Holds::Experts,
                (false, false) if p.running && averages_apart => Holds::Averages,
                (false, false) => Holds::Rest,
            };
            (ParamId::from(i), holds)
        })
    }

    fn has_experts_apart(&self, layer: usize) -> bool {
        self.params(layer).any(|(_, holds)| holds == Holds::Experts)
    }

    fn layer_elements(&self, layer: usize) -> u64 {
        let sharded = &self.sharded[self.graph.layers[layer].kind];
        let own = self.params(layer).filter(|(_, holds)| *holds != Holds::Tied);
        own.map(|(p, _)| sharded.params[p.index()].local.iter().product::<u64>()).sum()
    }

    fn bucket(&self, layers: Range<usize>, holds: Holds) -> BucketShape {
        let mut owners = Vec::new();
        for layer in layers.clone() {
            for (param, _) in self.params(layer).filter(|(_, held)| *held == holds) {
                owners.push((LayerId::from(layer), param));
            }
        }
        self.filled(layers, owners, holds)
    }

    /// A bucket of these parameters.
    fn filled(
        &self,
        layers: Range<usize>,
        mut owners: Vec<(LayerId, ParamId)>,
        holds: Holds,
    ) -> BucketShape {
        // What must be summed along tp stands first, so that one call covers it.
        owners.sort_by_key(|&(layer, param)| !self.sharded_param(layer, param).partial);
        let mut entries = Vec::with_capacity(owners.len());
        let mut offset = 0;
        let mut partial = 0;
        for &(layer, param) in &owners {
            let decl = self.graph.layer(layer).param(param);
            let sharded = self.sharded_param(layer, param);
            let layer_name = &self.graph.layers[layer.index()].name;
            let second_use = decl.tied && self.graph.layer(layer).input.is_some();
            let name = if decl.tied {
                "embedding.table.weight".to_string()
            } else {
                format!("{layer_name}.{}", decl.name)
            };
            let entry = Entry {
                name,
                dims: decl.dims,
                blocks: decl.blocks.clone(),
                experts: decl.experts,
                tp: sharded.placement,
                local: sharded.local,
                offset,
                init: decl.init,
                decay: decl.decay,
                running: decl.running,
                sparse: decl.sparse,
                counted: !second_use && !decl.running && !decl.sparse,
                norm_entry: norm_entry(self.graph, layer, param),
            };
            offset += entry.elements().div_ceil(BLOCK) * BLOCK;
            if sharded.partial {
                partial = offset;
            }
            entries.push(entry);
        }
        let (tied, experts) = (holds == Holds::Tied, holds == Holds::Experts);
        let step = BLOCK * if experts { self.expert_parts } else { self.parts };
        let first = &self.graph.layers[layers.start].name;
        let mut name = match (tied, layers.len()) {
            (true, _) => "embedding.table".to_string(),
            (false, 1) => first.clone(),
            (false, _) => format!("{first}..{}", self.graph.layers[layers.end - 1].name),
        };
        match holds {
            Holds::Experts => name.push_str(".experts"),
            Holds::Averages => name.push_str(".averages"),
            Holds::Tables => name = "tables".into(),
            Holds::Tied | Holds::Rest => {}
        }
        let elements = offset.div_ceil(step) * step;
        let [tables, averages] = [Holds::Tables, Holds::Averages].map(|kind| kind == holds);
        BucketShape {
            name,
            layers,
            entries,
            owners,
            elements,
            partial,
            tied,
            experts,
            tables,
            averages,
        }
    }

    fn sharded_param(&self, layer: LayerId, param: ParamId) -> super::shard::ShardedParam {
        self.sharded[self.graph.layers[layer.index()].kind].params[param.index()]
    }
}

/// What a bucket holds of its layers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// The embedding's table, which other layers use too.
    Tied,
    /// Experts that other ranks hold than the rest.
    Experts,
    /// Tables that are looked up.
    Tables,
    /// Running averages, where they are held apart.
    Averages,
    /// Everything else.
    Rest,
}

/// Whether running averages are not reduced and updated with the weights: compression would round them away,
/// what replicas that train apart do with momentum would carry a variance below zero, and a server that clips by
/// what it receives must not count them.
fn averages_apart(s: &Strategy) -> bool {
    s.compress != Compression::None || s.local.is_some() || s.sync.is_async()
}

/// A parameter's number among all of the model's, experts' last; the second use of a tied table has that
/// of the first.
fn norm_entry(graph: &Graph, layer: LayerId, param: ParamId) -> u32 {
    let decl = graph.layer(layer).param(param);
    if decl.tied && graph.layer(layer).input.is_some() {
        let first = graph.layer(LayerId(0));
        return first.params.iter().position(|p| p.tied).unwrap_or(0) as u32;
    }
    let experts = decl.experts > 0;
    let alike = |params: &[Param]| params.iter().filter(|p| (p.experts > 0) == experts).count();
    let before: usize =
        (0..layer.index()).map(|l| alike(&graph.layer(LayerId::from(l)).params)).sum();
    let own = alike(&graph.layer(layer).params[..param.index()]);
    let others = if experts { dense_norm_entries(graph) } else { 0 };
    others + (before + own) as u32
}

/// Number of entries of the gradient's norm.
pub(super) fn norm_entries(graph: &Graph) -> u32 {
    (0..graph.layers.len()).map(|l| graph.layer(LayerId::from(l)).params.len() as u32).sum()
}

/// Number of those that are no expert's, which come first.
pub(super) fn dense_norm_entries(graph: &Graph) -> u32 {
    let of = |layer| graph.layer(LayerId::from(layer)).params.iter().filter(|p| p.experts == 0);
    (0..graph.layers.len()).map(|layer| of(layer).count() as u32).sum()
}
