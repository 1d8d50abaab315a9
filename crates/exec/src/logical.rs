//! Tensors of a model by their logical names, as used in plans.

use paceline_plan::graph::build;
use paceline_plan::model::Model;
use std::collections::BTreeMap;

/// Every tensor of a model with its dimensions; a shared table appears once.
pub(crate) fn tensors(model: &Model) -> BTreeMap<String, [u64; 2]> {
    let graph = build(model, 1, 1, 1);
    let mut tensors = BTreeMap::new();
    for layer in &graph.layers {
        for param in &graph.kinds[layer.kind].params {
            let name = match (param.tied, param.borrowed) {
                (true, _) => "embedding.table.weight".to_owned(),
                (false, true) => format!("head.{}", param.name),
                (false, false) => format!("{}.{}", layer.name, param.name),
            };
            tensors.insert(name, param.dims);
        }
    }
    tensors
}
