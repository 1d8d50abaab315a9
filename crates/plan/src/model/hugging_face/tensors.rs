//! Tensors of Hugging Face files, as views of theirs in the order of ours.
//!
//! Ours are `[outputs, inputs]`, with queries, keys and values stacked by rows in one matrix, gate
//! and up likewise, and the matrices of all experts. A row of a family's table names the source of
//! one of ours, and its [`Layout`]. Where elements of theirs lie otherwise, a [`View`] walks them in
//! our order.
//!
//! Rotary positions turn element i with element i + half of a head. Files of some families have
//! adjacent pairs; their rows are permuted on the way.

use super::super::{Decoder, Model, ModelDims};
use super::Family;
use crate::graph;
use std::collections::BTreeMap;

/// Tensors of a family: name of ours, names of theirs, layout. `*` stands for `weight` or `bias`,
/// `{e}` for the number of an expert, `|` separates the sources of our blocks.
pub(super) type Rows = &'static [(&'static str, &'static str, Layout)];

/// Arrangement of their elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// As ours; several sources one after the other.
    Same,
    /// As ours, with a dimension of one.
    Matrix,
    /// Transposed.
    Transposed,
    /// Queries, keys and values, each of its own tensor.
    Heads,
    /// By key head: its queries, the key, the value.
    Grouped,
    /// This number of rows precedes ours.
    Behind(u64),
    /// A tensor for each expert, or several.
    Experts,
    /// One tensor for all experts: `[experts, inputs, outputs]`.
    Stacked,
    /// The same, with gate and up alternating among the outputs.
    Alternating,
    /// The biases of that.
    AlternatingBias,
    /// Rotated and other elements of a head's queries, from a latent vector.
    LatentQueries,
    /// The same, from the stream.
    DirectQueries,
    /// The rows of the matrix below latent keys and values that make up the latent vector.
    LatentKeys,
    /// The rows below them that make up the rotated keys.
    LatentRotated,
    /// The first half of the columns.
    Left,
    /// The second half of the columns.
    Right,
}

/// Elements of one of their tensors, in our order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Their name.
    pub name: String,
    /// Their shape.
    pub shape: Vec<u64>,
    /// Index of the first element.
    first: u64,
    /// Loops over elements, the outermost first: number of steps, and stride.
    walk: Vec<(u64, u64)>,
}

impl View {
    fn new(name: &str, shape: Vec<u64>, first: u64, walk: Vec<(u64, u64)>) -> Self {
        Self { name: name.to_owned(), shape, first, walk }
    }

    /// A view of all elements in their order.
    fn whole(name: &str, shape: Vec<u64>) -> Self {
        let len = shape.iter().product();
        Self::new(name, shape, 0, vec![(len, 1)])
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.walk.iter().map(|(steps, _)| steps).product()
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of elements of their tensor.
    pub fn total(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Runs of elements that lie one after the other in both orders: first index of theirs, and
    /// length.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (outer, run) = match self.walk.split_last() {
            Some((&(steps, 1), outer)) => (outer, steps),
            _ => (&self.walk[..], 1),
        };
        let count: u64 = outer.iter().map(|(steps, _)| steps).product();
        (0..count).map(move |number| {
            let (mut number, mut at) = (number, self.first);
            for &(steps, stride) in outer.iter().rev() {
                at += number % steps * stride;
                number /= steps;
            }
            (at, run)
        })
    }
}

/// Sources of every tensor of a model by the names of ours, or the first that the family lacks.
/// `paired` tells whether files hold rotary pairs adjacent.
pub(super) fn views(
    family: &Family,
    model: &Model,
    paired: bool,
) -> Result<BTreeMap<String, Vec<View>>, String> {
    let graph = graph::build(model, 1, 1, 1);
    let mut all = BTreeMap::new();
    for layer in &graph.layers {
        for param in &graph.kinds[layer.kind].params {
            let name = match (param.tied, param.borrowed) {
                (true, _) => "embedding.table.weight".to_owned(),
                (false, true) => format!("head.{}", param.name),
                (false, false) => format!("{}.{}", layer.name, param.name),
            };
            if all.contains_key(&name) {
                continue;
            }
            let of = Of { model, decoder: &model.decoder(), dims: param.dims, paired };
            let views = of.find(family, &name, &param.blocks).ok_or_else(|| name.clone())?;
            let len: u64 = views.iter().map(View::len).sum();
            if len != param.dims[0] * param.dims[1] {
                return Err(name);
            }
            all.insert(name, views);
        }
    }
    Ok(all)
}

/// One of our tensors.
struct Of<'a> {
    model: &'a ModelDims,
    decoder: &'a Decoder,
    dims: [u64; 2],
    paired: bool,
}

impl Of<'_> {
    fn find(&self, family: &Family, name: &str, blocks: &[u64]) -> Option<Vec<View>> {
        let (prefix, what, rows) = match name.strip_prefix("blocks.") {
            Some(rest) => {
                let (number, what) = rest.split_once('.')?;
                (family.layer.replace("{}", number), what, (family.tensors)(self.decoder))
            }
            None => (String::new(), name, family.outside),
        };
        // Decoders of one family may differ in the layout of a tensor: the first that fits counts.
        rows.iter().find_map(|(ours, theirs, layout)| {
            let (stem, kind) = what.rsplit_once('.').unwrap_or((what, ""));
            let matches = *ours == what || ours.strip_suffix(".*") == Some(stem);
            let names: Vec<String> = theirs
                .split('|')
                .map(|name| format!("{prefix}{}", name.replace('*', kind)))
                .collect();
            if matches { self.views(&names, *layout, blocks) } else { None }
        })
    }

    /// Shape of theirs for `rows` rows of ours: a single row is a vector.
    fn shape(&self, rows: u64) -> Vec<u64> {
        let [all, columns] = self.dims;
        if all == 1 { vec![rows * columns] } else { vec![rows, columns] }
    }

    fn views(&self, names: &[String], layout: Layout, blocks: &[u64]) -> Option<Vec<View>> {
        let [rows, columns] = self.dims;
        let name = names.first()?;
        let (m, latent) = (self.model, self.model.latent);
        // A vector's blocks lie along its only row.
        let width = if rows == 1 { 1 } else { columns };
        let whole = |shape| Some(vec![View::whole(name, shape)]);
        let experts = m.experts.experts;
        match layout {
            Layout::Same if names.len() == 1 => whole(self.shape(rows)),
            Layout::Same => {
                let of = |(name, block): (&String, &u64)| {
                    let shape = if rows == 1 { vec![*block] } else { vec![*block, columns] };
                    View::whole(name, shape)
                };
                (names.len() == blocks.len()).then(|| names.iter().zip(blocks).map(of).collect())
            }
            Layout::Matrix => whole(vec![rows, columns]),
            Layout::Transposed => {
                let walk = vec![(rows, 1), (columns, rows)];
                Some(vec![View::new(name, vec![columns, rows], 0, walk)])
            }
            Layout::Behind(extra) => {
                let shape = vec![rows + extra, columns];
                Some(vec![View::new(name, shape, extra * columns, vec![(rows * columns, 1)])])
            }
            Layout::Heads => {
                let counts = [m.heads, m.kv_heads, m.kv_heads];
                let turned = match self.decoder.rotary.dims {
                    0 => m.head_dim,
                    dims => dims,
                };
                let mut all = Vec::new();
                for (at, (name, heads)) in names.iter().zip(counts).enumerate() {
                    let own = heads * m.head_dim;
                    let shape = if rows == 1 { vec![own] } else { vec![own, columns] };
                    match self.paired && at < 2 {
                        true => {
                            all.extend(pairs(name, &shape, (heads, m.head_dim), (0, turned), width))
                        }
                        false => all.push(View::whole(name, shape)),
                    }
                }
                Some(all)
            }
            Layout::Grouped => {
                let (kv, group) = (m.kv_heads, m.heads / m.kv_heads.max(1));
                let head = m.head_dim * width;
                let stride = (group + 2) * head;
                let part = |first: u64, heads: u64| {
                    View::new(
                        name,
                        self.shape(rows),
                        first * head,
                        vec![(kv, stride), (heads * head, 1)],
                    )
                };
                Some(vec![part(0, group), part(group, 1), part(group + 1, 1)])
            }
            Layout::Experts => {
                let each = rows / experts.max(1) / names.len() as u64;
                let of = |expert: u64, name: &String| {
                    View::whole(&name.replace("{e}", &expert.to_string()), vec![each, columns])
                };
                let all = (0..experts).flat_map(|e| names.iter().map(move |name| of(e, name)));
                Some(all.collect())
            }
            Layout::Stacked | Layout::Alternating => {
                let out = rows / experts.max(1);
                let shape = vec![experts, columns, out];
                let walk = match layout {
                    Layout::Stacked => vec![(experts, columns * out), (out, 1), (columns, out)],
                    _ => vec![(experts, columns * out), (2, 1), (out / 2, 2), (columns, out)],
                };
                Some(vec![View::new(name, shape, 0, walk)])
            }
            Layout::AlternatingBias => {
                let walk = vec![(rows, columns), (2, 1), (columns / 2, 2)];
                Some(vec![View::new(name, vec![rows, columns], 0, walk)])
            }
            Layout::LatentQueries if latent.q_lora == 0 => None,
            Layout::DirectQueries if latent.q_lora > 0 => None,
            Layout::LatentQueries | Layout::DirectQueries => {
                let shape = self.shape(rows);
                if !self.paired {
                    return whole(shape);
                }
                let at = (m.head_dim - latent.qk_rope, latent.qk_rope);
                Some(pairs(name, &shape, (m.heads, m.head_dim), at, columns))
            }
            Layout::LatentKeys => {
                let shape = vec![latent.kv_lora + latent.qk_rope, columns];
                Some(vec![View::new(name, shape, 0, vec![(rows * columns, 1)])])
            }
            Layout::LatentRotated => {
                let shape = vec![latent.kv_lora + latent.qk_rope, columns];
                let first = latent.kv_lora * columns;
                let walk = match self.paired {
                    true => vec![(2, columns), (rows / 2, 2 * columns), (columns, 1)],
                    false => vec![(rows * columns, 1)],
                };
                Some(vec![View::new(name, shape, first, walk)])
            }
            Layout::Left | Layout::Right => {
                let first = if layout == Layout::Left { 0 } else { rows };
                let walk = vec![(rows, 2 * rows), (columns, 1)];
                Some(vec![View::new(name, vec![rows, 2 * columns], first, walk)])
            }
        }
    }
}

/// Views of heads in which `turned` elements from `first` on lie in adjacent pairs: ours are the
/// first of each pair, then the second of each.
fn pairs(
    name: &str,
    shape: &[u64],
    (heads, head_dim): (u64, u64),
    (first, turned): (u64, u64),
    width: u64,
) -> Vec<View> {
    let mut views = Vec::new();
    for head in 0..heads {
        let start = head * head_dim;
        let mut push = |at: u64, walk: Vec<(u64, u64)>| {
            let view = View::new(name, shape.to_vec(), (start + at) * width, walk);
            if !view.is_empty() {
                views.push(view);
            }
        };
        push(0, vec![(first * width, 1)]);
        push(first, vec![(2, width), (turned / 2, 2 * width), (width, 1)]);
        push(first + turned, vec![((head_dim - first - turned) * width, 1)]);
    }
    views
}
