//! Distributes a stage's parameters over buckets that are reduced, updated and gathered together.

use super::shard::ShardedLayer;
use super::tables::{self, TableUpdate};
use crate::compress::Compression;
use crate::dtype::DType;
use crate::graph::{BLOCK, Graph};
use crate::ids::{LayerId, ParamId};
use crate::program::Entry;
use crate::strategy::{Strategy, Zero};
use std::ops::Range;

/// A bucket before its buffers are assigned.
#[derive(Clone, Debug)]
pub(super) struct BucketShape {
    pub(super) name: String,
    /// Layers whose backward pass fills it.
    pub(super) layers: Range<usize>,
    pub(super) entries: Vec<Entry>,
    /// Parameters of the entries, in the same order.
    pub(super) owners: Vec<(LayerId, ParamId)>,
    /// Padded size, so that every rank's shard is a whole number of blocks.
    pub(super) elements: u64,
    /// Number of leading elements whose gradients must be summed along the tensor-parallel axis.
    pub(super) partial: u64,
    /// True if it is the embedding's table, used by other layers too.
    pub(super) tied: bool,
    /// True if it holds experts that are on other ranks than the rest of their layers.
    pub(super) experts: bool,
    /// True if it holds embedding tables, which are excluded from the gradient norm.
    pub(super) tables: bool,
    /// True if it holds only running averages.
    pub(super) averages: bool,
}

impl BucketShape {
    /// Type in which layers read its weights.
    pub(super) fn dtype(&self, strategy: &Strategy) -> DType {
        if self.tables { DType::F32 } else { strategy.activation_dtype() }
    }
}

/// Inputs of the distribution over buckets.
pub(super) struct Deal<'a> {
    pub(super) graph: &'a Graph,
    pub(super) sharded: &'a [ShardedLayer],
    pub(super) strategy: &'a Strategy,
    /// Number of shards of a bucket: replicas under ZeRO, or servers.
    pub(super) parts: u64,
    /// Number of shards of a bucket of separate experts.
    pub(super) expert_parts: u64,
    /// Numbers of parameters before each layer and in all, outside experts and of experts.
    pub(super) before: Vec<[u32; 2]>,
}

impl Deal<'_> {
    /// Buckets of consecutive layers, in the order in which the backward pass fills them. A tied
    /// table has its own bucket, and so do experts on other ranks. Running averages have one if the
    /// synchronisation of replicas would not preserve them as averages. Tables with gradients come
    /// last.
    pub(super) fn buckets(&self, layers: Range<usize>) -> Vec<BucketShape> {
        let mut buckets = Vec::new();
        let mut end = layers.end;
        let mut size = 0;
        for layer in layers.clone().rev() {
            size += self.layer_elements(layer) * self.strategy.grad_dtype.size();
            let full = size >= self.strategy.bucket.0 || self.strategy.zero == Zero::Parameters;
            if size > 0 && (full || layer == layers.start) {
                if (layer..end).any(|layer| self.has_separate_experts(layer)) {
                    buckets.push(self.bucket(layer..end, BucketKind::Experts));
                }
                let averages = |(_, holds)| holds == BucketKind::Averages;
                if (layer..end).any(|layer| self.params(layer).any(averages)) {
                    buckets.push(self.bucket(layer..end, BucketKind::Averages));
                }
                buckets.push(self.bucket(layer..end, BucketKind::Rest));
                end = layer;
                size = 0;
            }
            if self.params(layer).any(|(_, holds)| holds == BucketKind::Tied) {
                // All uses from the head on share one gradient.
                let first = self.graph.layer(LayerId::from(layer)).input.is_none();
                let known = buckets.iter().any(|bucket: &BucketShape| bucket.tied);
                if first || !known {
                    buckets.push(self.bucket(layer..layer + 1, BucketKind::Tied));
                }
            }
        }
        if tables::table_update(self.strategy) != TableUpdate::SparseStep {
            buckets.extend(self.tables(layers));
        }
        buckets
    }

    /// Tables of consecutive layers, if there are any.
    pub(super) fn tables(&self, layers: Range<usize>) -> Option<BucketShape> {
        let layer = layers.into_iter().find(|&layer| {
            self.graph.layer(LayerId::from(layer)).params.iter().any(|param| param.sparse)
        })?;
        let params = self.graph.layer(LayerId::from(layer)).params.iter().enumerate();
        let sparse = params.filter(|(_, param)| param.sparse).map(|(i, _)| ParamId::from(i));
        let owners = sparse.map(|param| (LayerId::from(layer), param)).collect();
        Some(self.filled(layer..layer + 1, owners, BucketKind::Tables))
    }

    /// Parameters of a layer except its tables, each with the kind of its bucket.
    fn params(&self, layer: usize) -> impl Iterator<Item = (ParamId, BucketKind)> {
        let params = &self.graph.layer(LayerId::from(layer)).params;
        let separate = self.strategy.has_separate_experts();
        let dense = params.iter().enumerate().filter(|(_, p)| !p.sparse && !p.borrowed);
        let separate_averages = separate_running_averages(self.strategy);
        dense.map(move |(i, p)| {
            let holds = match (p.tied, p.experts > 0 && separate) {
                (true, _) => BucketKind::Tied,
                (false, true) => BucketKind::Experts,
                (false, false) if p.running && separate_averages => BucketKind::Averages,
                (false, false) => BucketKind::Rest,
            };
            (ParamId::from(i), holds)
        })
    }

    fn has_separate_experts(&self, layer: usize) -> bool {
        self.params(layer).any(|(_, holds)| holds == BucketKind::Experts)
    }

    fn layer_elements(&self, layer: usize) -> u64 {
        let sharded = &self.sharded[self.graph.layers[layer].kind];
        let own = self.params(layer).filter(|(_, holds)| *holds != BucketKind::Tied);
        own.map(|(p, _)| sharded.params[p.index()].local.iter().product::<u64>()).sum()
    }

    fn bucket(&self, layers: Range<usize>, holds: BucketKind) -> BucketShape {
        let mut owners = Vec::new();
        for layer in layers.clone() {
            for (param, _) in self.params(layer).filter(|(_, held)| *held == holds) {
                owners.push((LayerId::from(layer), param));
            }
        }
        self.filled(layers, owners, holds)
    }

    /// Index of a parameter among all of the model's, experts last; the second use of a tied table
    /// has the index of the first.
    fn norm_entry(&self, layer: LayerId, param: ParamId) -> u32 {
        let decl = self.graph.layer(layer).param(param);
        if decl.tied && self.graph.layer(layer).input.is_some() {
            let first = self.graph.layer(LayerId(0));
            return first.params.iter().position(|p| p.tied).unwrap_or(0) as u32;
        }
        let experts = decl.experts > 0;
        let own = self.graph.layer(layer).params[..param.index()].iter();
        let own = own.filter(|param| (param.experts > 0) == experts).count() as u32;
        let others = if experts { self.before[self.graph.layers.len()][0] } else { 0 };
        others + self.before[layer.index()][usize::from(experts)] + own
    }

    /// Builds a bucket of the given parameters.
    fn filled(
        &self,
        layers: Range<usize>,
        mut owners: Vec<(LayerId, ParamId)>,
        holds: BucketKind,
    ) -> BucketShape {
        // Parameters to be summed along tp come first, so that one call covers them.
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
                norm_entry: self.norm_entry(layer, param),
            };
            offset += entry.elements().div_ceil(BLOCK) * BLOCK;
            if sharded.partial {
                partial = offset;
            }
            entries.push(entry);
        }
        let (tied, experts) = (holds == BucketKind::Tied, holds == BucketKind::Experts);
        let step = BLOCK * if experts { self.expert_parts } else { self.parts };
        let first = &self.graph.layers[layers.start].name;
        let mut name = match (tied, layers.len()) {
            (true, _) => "embedding.table".to_string(),
            (false, 1) => first.clone(),
            (false, _) => format!("{first}..{}", self.graph.layers[layers.end - 1].name),
        };
        match holds {
            BucketKind::Experts => name.push_str(".experts"),
            BucketKind::Averages => name.push_str(".averages"),
            BucketKind::Tables => name = "tables".into(),
            BucketKind::Tied | BucketKind::Rest => {}
        }
        let elements = offset.div_ceil(step) * step;
        let [tables, averages] =
            [BucketKind::Tables, BucketKind::Averages].map(|kind| kind == holds);
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

/// Contents of a bucket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BucketKind {
    /// The embedding's table, used by other layers too.
    Tied,
    /// Experts on other ranks than the rest of their layers.
    Experts,
    /// Embedding tables (sparse lookups).
    Tables,
    /// Running averages, if they have a separate bucket.
    Averages,
    /// Everything else.
    Rest,
}

/// Returns true if running averages are not reduced and updated with the weights. Compression would
/// round them away, and the momentum of an outer step could make a variance negative. A server that
/// clips by what it receives must not count them.
fn separate_running_averages(s: &Strategy) -> bool {
    s.compress != Compression::None || s.local.is_some() || s.sync.is_async()
}

/// Numbers of parameters before each layer and in all, outside experts and of experts.
pub(super) fn params_before(graph: &Graph) -> Vec<[u32; 2]> {
    let mut before = vec![[0; 2]];
    for layer in 0..graph.layers.len() {
        let mut counts = before[layer];
        for param in &graph.layer(LayerId::from(layer)).params {
            counts[usize::from(param.experts > 0)] += 1;
        }
        before.push(counts);
    }
    before
}

/// Number of entries of the gradient norm.
pub(super) fn norm_entries(graph: &Graph) -> u32 {
    (0..graph.layers.len()).map(|l| graph.layer(LayerId::from(l)).params.len() as u32).sum()
}

/// Number of entries outside experts, which come first.
pub(super) fn dense_norm_entries(graph: &Graph) -> u32 {
    let of = |layer| graph.layer(LayerId::from(layer)).params.iter().filter(|p| p.experts == 0);
    (0..graph.layers.len()).map(|layer| of(layer).count() as u32).sum()
}
