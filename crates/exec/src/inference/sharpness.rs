//! Sharpness of a minimum: the loss under small random changes of the weights.

use crate::run::outcome::Parameters;
use paceline_kernels::philox::Stream;

/// Weights moved in a random direction by `share` of every tensor's norm.
///
/// A direction relative to each tensor's norm makes networks comparable whose weights differ in
/// scale without differing in function (Li et al., "Visualizing the Loss Landscape of Neural Nets",
/// NeurIPS 2018, section 4).
pub fn perturbed(parameters: &Parameters, share: f64, seed: u64) -> Parameters {
    let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let moved = |(name, values): (&String, &Vec<f32>)| {
        let mut direction = vec![0.0; values.len()];
        Stream::new(seed, name).fill_normal(0, 0.0, 1.0, &mut direction);
        let length = norm(&direction);
        let step = if length > 0.0 { share * norm(values) / length } else { 0.0 };
        let add =
            |(value, along): (&f32, &f32)| (f64::from(*value) + step * f64::from(*along)) as f32;
        (name.clone(), values.iter().zip(&direction).map(add).collect())
    };
    parameters.iter().map(moved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_moves_by_its_share() {
        let weights = Parameters::from([
            ("a".to_owned(), vec![3.0, 4.0]),
            ("b".to_owned(), (0..1000).map(|i| i as f32 * 1e-3).collect()),
            ("zero".to_owned(), vec![0.0; 5]),
        ]);
        let moved = perturbed(&weights, 0.1, 7);
        for (name, values) in &weights {
            let apart = values.iter().zip(&moved[name]).map(|(a, b)| f64::from(a - b).powi(2));
            let (apart, norm) = (
                apart.sum::<f64>().sqrt(),
                values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt(),
            );
            assert!((apart - 0.1 * norm).abs() <= 1e-4 * norm, "{name}: {apart} of {norm}");
        }
        assert_eq!(moved, perturbed(&weights, 0.1, 7));
        assert_ne!(moved, perturbed(&weights, 0.1, 8));
    }
}
