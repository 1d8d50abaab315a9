//! A gain or a matrix, with an optional bias.

use crate::run::outcome::Parameters;
use paceline_kernels::pool::Pool;
use paceline_kernels::{Rows, bias, linear, norm};

/// A gain or a matrix, and a bias if the model has one.
#[derive(Debug)]
pub(super) struct Affine {
    pub(super) weight: Vec<f32>,
    pub(super) bias: Option<Vec<f32>>,
}

impl Affine {
    /// Takes `name.weight` and `name.bias` from a model's tensors. The names are the model's own,
    /// so the weight is present.
    pub(super) fn take(tensors: &mut Parameters, name: &str) -> Self {
        Self {
            weight: tensors.remove(&format!("{name}.weight")).unwrap_or_default(),
            bias: tensors.remove(&format!("{name}.bias")),
        }
    }

    /// Product of `rows` rows with the matrix, plus the bias.
    pub(super) fn product(&self, pool: &Pool, rows: usize, x: &[f32]) -> Vec<f32> {
        let inputs = x.len() / rows.max(1);
        let outputs = self.weight.len() / inputs.max(1);
        let mut y = vec![0.0; rows * outputs];
        let shape = linear::Shape { rows, inputs, outputs };
        linear::forward(pool, shape, x, &self.weight, &mut y);
        if let Some(added) = &self.bias {
            let product = y.clone();
            bias::forward(Rows { rows, width: outputs }, &product, added, &mut y);
        }
        y
    }

    /// Rows normalised with the gain: layer norm if there is a bias, RMS norm otherwise.
    pub(super) fn normed(&self, epsilon: f64, x: &[f32]) -> Vec<f32> {
        let width = self.weight.len();
        let rows = Rows { rows: x.len() / width.max(1), width };
        let mut y = vec![0.0; x.len()];
        let mut stats = vec![0.0; 2 * rows.rows];
        let (epsilon, gain) = (epsilon as f32, &self.weight);
        match &self.bias {
            Some(bias) => {
                norm::layer_norm_forward(rows, epsilon, x, gain, bias, &mut y, &mut stats);
            }
            None => {
                let stats = &mut stats[..rows.rows];
                norm::rms_norm_forward(rows, epsilon, x, gain, &mut y, stats);
            }
        }
        y
    }
}
