//! Recommendation models (Naumov et al., "Deep learning recommendation model for personalization
//! and recommendation systems", arXiv 1906.00091): sizes of tables and networks.

use super::fields::Fields;
use super::{Activation, Body, Experts, Latent, MAX_PARAMETERS, Model, ModelDims, ModelKind};
use crate::located::Errors;
use serde::Serialize;

/// Dimensions of a recommendation model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Dlrm {
    /// Number of dense features of a sample.
    pub dense: u64,
    /// Number of rows of each table: the values of each of a sample's categories.
    pub tables: Vec<u64>,
    /// Width of a row.
    #[serde(rename = "width")]
    pub width: u64,
    /// Number of rows of each table that a sample looks up and sums.
    pub lookups: u64,
    /// Hidden widths of the bottom network on dense features; its output has the width of a row.
    pub bottom: Vec<u64>,
    /// Hidden widths of the top network on the interactions; its output is one number.
    pub top: Vec<u64>,
}

impl Dlrm {
    /// Number of rows of all tables.
    pub fn rows(&self) -> u64 {
        self.tables.iter().sum()
    }

    /// Number of interacting vectors: one for each table, and the output of the bottom network.
    pub fn vectors(&self) -> u64 {
        self.tables.len() as u64 + 1
    }

    /// Input width of the top network: a vector, and the products of all pairs.
    pub fn met(&self) -> u64 {
        self.width + self.vectors() * (self.vectors() - 1) / 2
    }

    /// Inputs and outputs of every layer of the bottom network.
    pub fn bottom_layers(&self) -> Vec<(u64, u64)> {
        chain(self.dense, &self.bottom, self.width)
    }

    /// Inputs and outputs of every layer of the top network.
    pub fn top_layers(&self) -> Vec<(u64, u64)> {
        chain(self.met(), &self.top, 1)
    }

    pub(super) fn count(&self) -> u128 {
        let layers = self.bottom_layers().into_iter().chain(self.top_layers());
        let networks: u128 = layers.map(|(i, o)| (u128::from(i) + 1) * u128::from(o)).sum();
        let rows: u128 = self.tables.iter().map(|&rows| u128::from(rows)).sum();
        networks + rows * u128::from(self.width)
    }

    /// Largest activation of one sample, in elements.
    pub(crate) fn largest_activation(&self) -> u64 {
        let widest = self.bottom.iter().chain(&self.top).copied().max().unwrap_or(1);
        widest.max(self.met()).max(self.vectors() * self.width).max(self.dense)
    }
}

/// Inputs and outputs of every layer of a network.
fn chain(first: u64, widths: &[u64], last: u64) -> Vec<(u64, u64)> {
    let all: Vec<u64> = [first].into_iter().chain(widths.iter().copied()).chain([last]).collect();
    all.windows(2).map(|pair| (pair[0], pair[1])).collect()
}

/// Maximum number of tables, rows per table, layers per network, width and lookups.
const TABLES: usize = 1024;
const ROWS: u64 = 1 << 32;
const LAYERS: usize = 64;
const WIDTH: u64 = 1 << 16;
const LOOKUPS: u64 = 1 << 12;

const KEYS: [&str; 8] = ["name", "kind", "dense", "tables", "width", "lookups", "bottom", "top"];

/// Reads a model file of kind `dlrm`.
pub(super) fn parse(fields: &mut Fields) -> Body {
    let dense = fields.whole("dense", 1..=WIDTH, "13", None);
    let tables = fields.list("tables", 1..=TABLES, 1..=ROWS, "[1000, 50, 200000]");
    let width = fields.whole("width", 1..=WIDTH, "64", None);
    let lookups = fields.whole("lookups", 1..=LOOKUPS, "1", Some(1));
    let bottom = fields.list("bottom", 0..=LAYERS, 1..=WIDTH, "[512, 256]");
    let top = fields.list("top", 0..=LAYERS, 1..=WIDTH, "[512, 256]");
    fields.refuse_unknown(ModelKind::Dlrm, &KEYS);
    Body::Clicks(Dlrm { dense, tables, width, lookups, bottom, top })
}

/// Model file of a recommendation model, without its name and kind.
pub(super) fn to_toml(net: &Dlrm) -> String {
    format!(
        "dense = {}\ntables = {:?}\nwidth = {}\nlookups = {}\nbottom = {:?}\ntop = {:?}\n",
        net.dense, net.tables, net.width, net.lookups, net.bottom, net.top
    )
}

impl Model {
    /// Builds a recommendation model; an error if it has too many parameters.
    pub fn dlrm(name: impl Into<String>, net: Dlrm) -> Result<Self, Errors> {
        Self::from_body(name.into(), Body::Clicks(net))
    }
}

/// Generic dimensions of a recommendation model: one sample is one token, and the vocabulary has
/// two entries, yes and no.
pub(super) fn shape(net: &Dlrm) -> ModelDims {
    ModelDims {
        kind: ModelKind::Dlrm,
        layers: (net.bottom.len() + net.top.len() + 2) as u64,
        d_model: net.width,
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        ffn: 0,
        seq: 1,
        max_positions: 0,
        vocab: 2,
        tied: false,
        qk_norm: false,
        experts: Experts::default(),
        latent: Latent::default(),
        mtp: Default::default(),
        activation: Activation::Relu,
        norm_eps: 0.0,
        rope_theta: 0.0,
    }
}

/// Problem and remedy if a dimension or the parameter count is out of range.
pub(super) fn too_large(net: &Dlrm) -> Option<(String, String)> {
    let widths = net.bottom.iter().chain(&net.top).chain([&net.width, &net.dense]);
    let sound = (1..=TABLES).contains(&net.tables.len())
        && net.tables.iter().all(|rows| (1..=ROWS).contains(rows))
        && net.bottom.len().max(net.top.len()) <= LAYERS
        && widths.into_iter().all(|width| (1..=WIDTH).contains(width))
        && (1..=LOOKUPS).contains(&net.lookups);
    if !sound {
        let problem = "a number of the model is out of range".to_owned();
        let remedy = format!(
            "use 1 to {TABLES} tables of 1 to {ROWS} rows, 1 to {LOOKUPS} lookups, up to {LAYERS} \
             layers and widths of 1 to {WIDTH}"
        );
        return Some((problem, remedy));
    }
    let count = net.count();
    (count > u128::from(MAX_PARAMETERS)).then(|| {
        (
            format!("the model would have {:.1e} parameters", count as f64),
            "lower `tables` or `width`".to_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::built_in;

    #[test]
    fn networks_and_tables_are_counted() {
        let model = built_in::get("dlrm-criteo").unwrap().unwrap_or_else(|e| panic!("{e}"));
        let Body::Clicks(net) = model.body() else { panic!("a model of clicks") };
        assert_eq!((net.rows(), net.vectors(), net.met()), (187_767_399, 27, 479));
        assert_eq!(net.bottom_layers(), [(13, 512), (512, 256), (256, 128)]);
        let top = [(479, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)];
        assert_eq!(net.top_layers(), top);
        let networks: u64 = net.bottom_layers().iter().chain(&top).map(|(i, o)| (i + 1) * o).sum();
        assert_eq!(model.parameters(), 187_767_399 * 128 + networks);
    }

    #[test]
    fn files_are_read_back_and_their_slips_are_told() {
        for name in ["dlrm-mini", "dlrm-criteo"] {
            let model = built_in::get(name).unwrap().unwrap_or_else(|errors| panic!("{errors}"));
            assert_eq!(Model::parse(&model.to_toml(), "x.toml").unwrap(), model);
        }
        let text = "kind = \"dlrm\"\ndense = 4\nwidth = 8\ntables = []\nbottom = []\ntop = 3\n";
        let told = Model::parse(text, "d.toml").unwrap_err().to_string();
        assert_eq!(told.lines().count(), 2, "{told}");
        assert!(
            told.contains("d.toml:4: `tables` is an empty list; use 1 to 1024 whole numbers"),
            "{told}"
        );
        assert!(told.contains("d.toml:6: `top` is 3; use 0 to 64 whole numbers"), "{told}");
    }
}
