//! Samples divided among the replicas of federated averaging (McMahan et al., "Communication-
//! Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).
//!
//! Every replica is a client with samples of its own, which no other replica reads; only weights
//! leave it. With a Dirichlet split each class is divided among the clients by proportions drawn
//! from Dir(α): the smaller α, the fewer clients share a class (Hsu, Qi and Brown, "Measuring the
//! Effects of Non-Identical Data Distribution for Federated Visual Classification", arXiv
//! 1909.06335). In every round a part of the clients takes part; their mean is weighted by their
//! numbers of samples.

use paceline_kernels::philox::Stream;
use std::fmt;
use std::str::FromStr;

/// Division of the samples among clients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ClientSplit {
    /// Equal shares of every class.
    Iid,
    /// Shares of every class drawn from a symmetric Dirichlet distribution with this α.
    Dirichlet(f64),
}

impl fmt::Display for ClientSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Iid => f.write_str("iid"),
            Self::Dirichlet(alpha) => write!(f, "dirichlet:{alpha}"),
        }
    }
}

impl FromStr for ClientSplit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is neither iid nor dirichlet:A with A from 0.001 to 1000");
        if text == "iid" {
            return Ok(Self::Iid);
        }
        let alpha = text.strip_prefix("dirichlet:").ok_or_else(wrong)?;
        let alpha: f64 = alpha.parse().map_err(|_| wrong())?;
        if (0.001..=1000.0).contains(&alpha) { Ok(Self::Dirichlet(alpha)) } else { Err(wrong()) }
    }
}

/// Federated averaging of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Federated {
    /// Division of the samples.
    pub split: ClientSplit,
    /// Fraction of the clients that take part in a round; at least one does.
    pub fraction: f64,
}

/// Samples and weights of the clients.
#[derive(Debug)]
pub(crate) struct Clients {
    /// Sample numbers of each client.
    samples: Vec<Vec<u64>>,
    /// Samples of all clients in an iteration.
    batch: u64,
    taking_part: usize,
    draws: Stream,
}

impl Clients {
    /// Divides samples 0 to `classes.len()` − 1, given their classes, among `clients` clients.
    pub(crate) fn new(
        federated: Federated,
        classes: &[u32],
        clients: u32,
        batch: u64,
        seed: u64,
    ) -> Self {
        let count = clients.max(1) as usize;
        let mut samples = vec![Vec::new(); count];
        match federated.split {
            ClientSplit::Iid => {
                let mut by_class: Vec<u64> = (0..classes.len() as u64).collect();
                by_class.sort_by_key(|sample| classes[*sample as usize]);
                for (at, sample) in by_class.into_iter().enumerate() {
                    samples[at % count].push(sample);
                }
            }
            ClientSplit::Dirichlet(alpha) => {
                let mut gammas = Gamma { draws: Stream::new(seed, "clients"), next: 0 };
                let kinds = classes.iter().max().map_or(0, |most| most + 1);
                for class in 0..kinds {
                    let of_class: Vec<u64> =
                        (0..).zip(classes).filter(|(_, c)| **c == class).map(|(n, _)| n).collect();
                    let weights: Vec<f64> = (0..count).map(|_| gammas.draw(alpha)).collect();
                    divide(&of_class, &weights, &mut samples);
                }
            }
        }
        give_everyone_one(&mut samples);
        // In the data's order, not class after class.
        samples.iter_mut().for_each(|own| own.sort_unstable());
        let taking_part = (federated.fraction * count as f64).round() as usize;
        let taking_part = taking_part.clamp(1, count);
        Self { samples, batch, taking_part, draws: Stream::new(seed, "rounds") }
    }

    /// Sample that takes the place of sample `number` of the run.
    pub(crate) fn sample(&self, number: u64) -> u64 {
        let each = (self.batch / self.samples.len() as u64).max(1);
        let (iteration, within) = (number / self.batch.max(1), number % self.batch.max(1));
        let client = ((within / each) as usize).min(self.samples.len() - 1);
        let own = &self.samples[client];
        let turn = iteration.wrapping_mul(each).wrapping_add(within % each);
        own[(turn % own.len().max(1) as u64) as usize]
    }

    /// Factor of a client's step in the plain mean over all clients: its share of the samples of
    /// those that take part in this round, times the number of clients; 0 for the others.
    pub(crate) fn factor(&self, client: u32, round: u32) -> f32 {
        let count = self.samples.len();
        let key = |client: usize| {
            (self.draws.bits(u64::from(round) * count as u64 + client as u64), client)
        };
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_unstable_by_key(|&client| key(client));
        let chosen = &order[..self.taking_part];
        if !chosen.contains(&(client as usize)) {
            return 0.0;
        }
        let all: usize = chosen.iter().map(|&client| self.samples[client].len()).sum();
        (self.samples[client as usize].len() as f64 / all as f64 * count as f64) as f32
    }
}

/// Deals samples out in proportion to weights.
fn divide(of_class: &[u64], weights: &[f64], into: &mut [Vec<u64>]) {
    let all: f64 = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let (mut sum, mut begun) = (0.0, 0);
    for (client, weight) in weights.iter().enumerate() {
        sum += weight / all;
        let last = client + 1 == weights.len();
        let end =
            if last { of_class.len() } else { (sum * of_class.len() as f64).round() as usize };
        let end = end.clamp(begun, of_class.len());
        into[client].extend(&of_class[begun..end]);
        begun = end;
    }
}

/// Moves a sample of the largest client to each that has none.
fn give_everyone_one(samples: &mut [Vec<u64>]) {
    for client in 0..samples.len() {
        if samples[client].is_empty() {
            let largest = (0..samples.len()).max_by_key(|&other| samples[other].len());
            let spare = largest.and_then(|largest| samples[largest].pop());
            samples[client].push(spare.unwrap_or(0));
        }
    }
}

/// Gamma-distributed numbers, whose normalised vectors are Dirichlet-distributed.
struct Gamma {
    draws: Stream,
    next: u64,
}

impl Gamma {
    /// A number from Γ(α, 1) (Marsaglia and Tsang, "A Simple Method for Generating Gamma Variables",
    /// 2000; for α < 1 by their section 6).
    fn draw(&mut self, alpha: f64) -> f64 {
        if alpha < 1.0 {
            let scale = self.uniform().powf(1.0 / alpha);
            return self.draw(alpha + 1.0) * scale;
        }
        let d = alpha - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let index = self.step();
            let x = f64::from(self.draws.normal(index));
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.uniform().ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }

    fn uniform(&mut self) -> f64 {
        let index = self.step();
        self.draws.uniform(index).max(f64::MIN_POSITIVE)
    }

    fn step(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn clients(split: ClientSplit, fraction: f64) -> (Clients, Vec<u32>) {
        let classes: Vec<u32> = (0..1000).map(|n| n % 10).collect();
        (Clients::new(Federated { split, fraction }, &classes, 5, 40, 3), classes)
    }

    /// Share of a client's most frequent class, averaged over the clients.
    fn skew(clients: &Clients, classes: &[u32]) -> f64 {
        let of = |own: &Vec<u64>| {
            let mut counts = [0usize; 10];
            own.iter().for_each(|&sample| counts[classes[sample as usize] as usize] += 1);
            *counts.iter().max().unwrap() as f64 / own.len() as f64
        };
        clients.samples.iter().map(of).sum::<f64>() / clients.samples.len() as f64
    }

    #[test]
    fn no_sample_is_read_by_two_clients() {
        for split in [ClientSplit::Iid, ClientSplit::Dirichlet(0.1), ClientSplit::Dirichlet(10.0)] {
            let (clients, _) = clients(split, 1.0);
            let all: Vec<u64> = clients.samples.iter().flatten().copied().collect();
            assert_eq!((all.len(), all.iter().collect::<BTreeSet<_>>().len()), (1000, 1000));
            for number in 0..4000 {
                let client = (number % 40 / 8) as usize;
                assert!(clients.samples[client].contains(&clients.sample(number)), "{split}");
            }
        }
    }

    #[test]
    fn a_small_alpha_gives_clients_few_classes() {
        let skew = |split| {
            let (clients, classes) = clients(split, 1.0);
            skew(&clients, &classes)
        };
        let (iid, mild, strong) = (
            skew(ClientSplit::Iid),
            skew(ClientSplit::Dirichlet(100.0)),
            skew(ClientSplit::Dirichlet(0.05)),
        );
        assert!(iid < mild + 0.05 && mild + 0.1 < strong, "{iid} {mild} {strong}");
    }

    #[test]
    fn the_mean_is_weighted_by_samples_of_those_who_take_part() {
        let (all, _) = clients(ClientSplit::Dirichlet(0.3), 1.0);
        for (client, own) in all.samples.iter().enumerate() {
            let wanted = own.len() as f32 / 1000.0 * 5.0;
            assert!((all.factor(client as u32, 7) - wanted).abs() < 1e-6);
        }
        let (some, _) = clients(ClientSplit::Dirichlet(0.3), 0.4);
        let mut seen = BTreeSet::new();
        for round in 0..50 {
            let factors: Vec<f32> = (0..5).map(|client| some.factor(client, round)).collect();
            let chosen: Vec<usize> = (0..5).filter(|&client| factors[client] > 0.0).collect();
            assert_eq!(chosen.len(), 2, "two of five");
            assert!((factors.iter().sum::<f32>() - 5.0).abs() < 1e-5, "{factors:?}");
            seen.extend(chosen);
        }
        assert_eq!(seen.len(), 5, "in time everybody takes part");
    }

    #[test]
    fn splits_are_written_as_they_are_read() {
        for text in ["iid", "dirichlet:0.5"] {
            assert_eq!(text.parse::<ClientSplit>().unwrap().to_string(), text);
        }
        for wrong in ["", "dirichlet", "dirichlet:", "dirichlet:0", "dirichlet:-1", "dirichlet:nan"]
        {
            assert!(wrong.parse::<ClientSplit>().is_err(), "{wrong}");
        }
    }
}
