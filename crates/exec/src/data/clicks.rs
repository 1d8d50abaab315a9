//! Generated clicks with a known loss floor.
//!
//! A sample has measured numbers and, for each category, some of its values. Every value and every
//! measured number has a weight for or against a click. Their sum gives the log-odds, and chance
//! decides. A model that knew all weights would still lose the entropy of the odds: no model goes
//! below. Popular values occur more often than others, as in real logs.

use paceline_kernels::philox::Stream;

/// Features of a sample, and its click label.
#[derive(Clone, Debug)]
pub struct Clicks {
    dense: u64,
    tables: Vec<u64>,
    lookups: u64,
    ids: Stream,
    measured: Stream,
    chance: Stream,
    /// Weights of category values and measured numbers; independent of the seed.
    pulls: Stream,
}

/// Standard deviation of the log-odds from all categories, and from all measured numbers.
const PULL: f64 = 1.5;
/// Number of samples whose mean entropy is reported as the floor, accurate to 0.005 nats.
const ESTIMATED: u64 = 1 << 13;

impl Clicks {
    /// Creates the samples of a seed.
    pub fn new(dense: u64, tables: Vec<u64>, lookups: u64, seed: u64) -> Self {
        Self {
            dense,
            tables,
            lookups,
            ids: Stream::new(seed, "ids"),
            measured: Stream::new(seed, "measured"),
            chance: Stream::new(seed, "chance"),
            pulls: Stream::new(0, "pulls"),
        }
    }

    /// Number of rows that a sample looks up.
    pub(super) fn looked_up(&self) -> usize {
        self.tables.len() * self.lookups as usize
    }

    /// Rows that a sample looks up: `lookups` rows for each table in turn.
    pub fn ids(&self, sample: u64, ids: &mut [u32]) {
        let first = sample.wrapping_mul(self.tables.len() as u64 * self.lookups);
        for (at, id) in ids.iter_mut().enumerate() {
            *id = self.id(first.wrapping_add(at as u64), at as u64 / self.lookups.max(1));
        }
    }

    fn id(&self, at: u64, table: u64) -> u32 {
        let rows = self.tables[table as usize];
        // Squares cluster at zero: half of the draws fall into a quarter of the values.
        let u = self.ids.uniform(at);
        ((u * u * rows as f64) as u64).min(rows - 1) as u32
    }

    /// Fills in the measured numbers of a sample.
    pub fn fill(&self, sample: u64, measured: &mut [f32]) {
        self.measured.fill_normal(sample.wrapping_mul(self.dense), 0.0, 1.0, measured);
    }

    /// Click label of a sample: 1 if it was clicked.
    pub fn clicked(&self, sample: u64) -> u32 {
        u32::from(self.chance.uniform(sample) < self.odds(sample))
    }

    /// Probability of a click.
    fn odds(&self, sample: u64) -> f64 {
        let tables = self.tables.len() as u64;
        let first = sample.wrapping_mul(tables * self.lookups);
        let mut counted = 0.0;
        let mut before = self.dense;
        for table in 0..tables {
            for lookup in 0..self.lookups {
                let id = self.id(first.wrapping_add(table * self.lookups + lookup), table);
                counted += f64::from(self.pulls.normal(before + u64::from(id)));
            }
            before += self.tables[table as usize];
        }
        let mut measured = 0.0;
        for at in 0..self.dense {
            let value = self.measured.normal(sample.wrapping_mul(self.dense).wrapping_add(at));
            measured += f64::from(self.pulls.normal(at)) * f64::from(value);
        }
        let share = |sum: f64, count: u64| sum / (count.max(1) as f64).sqrt();
        let odds = share(counted, tables * self.lookups) + share(measured, self.dense);
        1.0 / (1.0 + (-PULL * odds).exp())
    }

    /// Loss floor that no model goes below, in nats per sample.
    pub fn floor(&self) -> f64 {
        let entropy = |p: f64| {
            let of = |p: f64| if p > 0.0 { -p * p.ln() } else { 0.0 };
            of(p) + of(1.0 - p)
        };
        // Independent of the seed: the floor is a property of the model, not of the samples.
        let all = Self::new(self.dense, self.tables.clone(), self.lookups, 0);
        (0..ESTIMATED).map(|sample| entropy(all.odds(sample))).sum::<f64>() / ESTIMATED as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clicks(seed: u64) -> Clicks {
        Clicks::new(3, vec![100, 7, 1], 2, seed)
    }

    #[test]
    fn a_sample_is_its_number_and_seed() {
        let ids = |clicks: &Clicks, sample| {
            let mut ids = vec![u32::MAX; 6];
            clicks.ids(sample, &mut ids);
            ids
        };
        let one = clicks(5);
        assert_eq!(ids(&one, 9), ids(&clicks(5), 9));
        assert_ne!(ids(&one, 9), ids(&one, 10));
        for sample in [0, 77, u64::MAX] {
            let ids = ids(&one, sample);
            assert!(ids[..2].iter().all(|&id| id < 100) && ids[2..4].iter().all(|&id| id < 7));
            assert_eq!(ids[4..], [0, 0]);
            let mut measured = [f32::NAN; 3];
            one.fill(sample, &mut measured);
            assert!(measured.iter().all(|x| x.is_finite()));
        }
        assert_eq!(one.floor(), clicks(6).floor());
    }

    /// Prediction by the true odds has the floor as its loss; prediction without them loses more.
    #[test]
    fn the_floor_is_what_the_best_guess_loses() {
        let clicks = clicks(3);
        let samples = 20_000;
        let loss = |p: f64, clicked: u32| if clicked == 1 { -p.ln() } else { -(1.0 - p).ln() };
        let mut best = 0.0;
        let mut yes = 0.0;
        for sample in 0..samples {
            let clicked = clicks.clicked(sample);
            best += loss(clicks.odds(sample), clicked) / samples as f64;
            yes += f64::from(clicked) / samples as f64;
        }
        let floor = clicks.floor();
        assert!((best - floor).abs() < 0.01, "{best} {floor}");
        let blind = -yes * yes.ln() - (1.0 - yes) * (1.0 - yes).ln();
        assert!(blind > floor + 0.1, "{blind} {floor}");
    }
}
