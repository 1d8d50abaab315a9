//! Max–min fair rates: no flow can get more without taking from one that has no more than it.
//!
//! *Progressive filling* (Bertsekas and Gallager, "Data Networks", section 6.5.2): all rates grow
//! together until a link is full; the flows that cross it keep their rate, and the others continue
//! to grow. Transports that share fairly converge to these rates; immediate convergence is the
//! assumption of every fluid model.
//!
//! **Incremental.** A flow that starts or ends does not affect flows that no chain of shared links
//! connects to it. Rates are therefore recomputed only in components touched by events, and a flow
//! whose rate is bitwise unchanged is not reported.
//!
//! **Classes.** A flow may represent many equal ones. Its load on a link is then its rate times the
//! number of those flows that cross each link of that link's class: a [`Crossing`].

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Link that a flow crosses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Crossing {
    pub(super) link: u32,
    /// Number of flows of the class that cross it.
    pub(super) flows: f64,
}

/// Links, the flows on them, and the rate of each flow.
///
/// Flows are identified by small numbers that the caller assigns and may reuse after a removal.
#[derive(Debug, Default)]
pub(super) struct Fair {
    links: Vec<Link>,
    flows: Vec<Flow>,
    /// Links whose flows changed since the last filling.
    touched: Vec<u32>,
    /// Number of the current filling, to mark visited links and flows.
    filling: u64,
    /// Scratch heap, reused between fillings.
    levels: BinaryHeap<Level>,
}

#[derive(Debug)]
struct Link {
    capacity: f64,
    /// Flows that cross it, with the index among their crossings.
    flows: Vec<(u32, u32)>,
    seen: u64,
    /// While filling: remaining capacity, and number of flows without a rate yet.
    left: f64,
    open: f64,
}

#[derive(Clone, Debug, Default)]
struct Flow {
    crossings: Vec<Crossing>,
    /// Position in each link's list.
    places: Vec<u32>,
    rate: f64,
    seen: u64,
    filled: bool,
}

/// Rate at which a link would be full; the heap returns the lowest first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Level(f64, u32);

impl Eq for Level {}

impl Ord for Level {
    fn cmp(&self, other: &Self) -> Ordering {
        other.0.total_cmp(&self.0).then(other.1.cmp(&self.1))
    }
}

impl PartialOrd for Level {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Fair {
    /// Creates idle links with these capacities.
    pub(super) fn new(capacities: impl IntoIterator<Item = f64>) -> Self {
        let idle = |capacity| Link { capacity, flows: Vec::new(), seen: 0, left: 0.0, open: 0.0 };
        Self { links: capacities.into_iter().map(idle).collect(), ..Self::default() }
    }

    /// Changes the link capacities.
    pub(super) fn change(&mut self, capacities: &[f64]) {
        for (number, (link, &capacity)) in (0..).zip(self.links.iter_mut().zip(capacities)) {
            if link.capacity.to_bits() != capacity.to_bits() {
                link.capacity = capacity;
                self.touched.push(number);
            }
        }
    }

    /// Returns true if rates must be recomputed before they can be read.
    pub(super) fn stale(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Adds a flow.
    pub(super) fn add(&mut self, flow: u32, crossings: &[Crossing]) {
        if self.flows.len() <= flow as usize {
            self.flows.resize(flow as usize + 1, Flow::default());
        }
        let state = &mut self.flows[flow as usize];
        state.crossings.clear();
        state.crossings.extend_from_slice(crossings);
        state.places.clear();
        state.rate = 0.0;
        for (index, crossing) in crossings.iter().enumerate() {
            let link = &mut self.links[crossing.link as usize];
            state.places.push(link.flows.len() as u32);
            link.flows.push((flow, index as u32));
            self.touched.push(crossing.link);
        }
    }

    /// Removes a flow.
    pub(super) fn remove(&mut self, flow: u32) {
        for index in 0..self.flows[flow as usize].crossings.len() {
            let state = &self.flows[flow as usize];
            let (number, place) = (state.crossings[index].link, state.places[index]);
            let link = &mut self.links[number as usize];
            link.flows.swap_remove(place as usize);
            if let Some(&(moved, crossing)) = link.flows.get(place as usize) {
                self.flows[moved as usize].places[crossing as usize] = place;
            }
            self.touched.push(number);
        }
    }

    /// Recomputes rates in changed components and appends every flow whose rate changed.
    pub(super) fn fill(&mut self, changed: &mut Vec<(u32, f64)>) {
        self.filling += 1;
        let mut touched = std::mem::take(&mut self.touched);
        touched.retain(|&link| {
            let link = &mut self.links[link as usize];
            std::mem::replace(&mut link.seen, self.filling) != self.filling
        });
        // From here on, `touched` holds the links of all components in the order they are reached.
        let mut reached = 0;
        while reached < touched.len() {
            let number = touched[reached];
            reached += 1;
            let (mut open, flows) = (0.0, std::mem::take(&mut self.links[number as usize].flows));
            for &(flow, crossing) in &flows {
                let state = &mut self.flows[flow as usize];
                open += state.crossings[crossing as usize].flows;
                if std::mem::replace(&mut state.seen, self.filling) == self.filling {
                    continue;
                }
                state.filled = false;
                for crossing in &state.crossings {
                    let link = &mut self.links[crossing.link as usize];
                    if std::mem::replace(&mut link.seen, self.filling) != self.filling {
                        touched.push(crossing.link);
                    }
                }
            }
            let link = &mut self.links[number as usize];
            (link.flows, link.left, link.open) = (flows, link.capacity, open);
            if open > 0.0 {
                self.levels.push(Level(link.left / open, number));
            }
        }
        while let Some(Level(level, number)) = self.levels.pop() {
            self.saturate(number, level, changed);
        }
        touched.clear();
        self.touched = touched;
    }

    /// Fixes the rates of the flows on the link that is full first.
    ///
    /// A flow fixed on another link leaves more for the others here, so a link's level only rises.
    /// A link whose level has risen since it was queued is queued again.
    fn saturate(&mut self, number: u32, level: f64, changed: &mut Vec<(u32, f64)>) {
        let link = &mut self.links[number as usize];
        if link.open <= 0.0 {
            return;
        }
        let now = link.left / link.open;
        if now > level {
            self.levels.push(Level(now, number));
            return;
        }
        let flows = std::mem::take(&mut link.flows);
        for &(flow, _) in &flows {
            let state = &mut self.flows[flow as usize];
            if std::mem::replace(&mut state.filled, true) {
                continue;
            }
            for crossing in &state.crossings {
                let link = &mut self.links[crossing.link as usize];
                link.left = (link.left - level * crossing.flows).max(0.0);
                link.open -= crossing.flows;
            }
            if state.rate.to_bits() != level.to_bits() {
                state.rate = level;
                changed.push((flow, level));
            }
        }
        self.links[number as usize].flows = flows;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn crossings(links: &[u32]) -> Vec<Crossing> {
        links.iter().map(|&link| Crossing { link, flows: 1.0 }).collect()
    }

    /// Rates of flows that are all added at once.
    fn rates(capacities: &[f64], flows: &[Vec<Crossing>]) -> Vec<f64> {
        let mut fair = Fair::new(capacities.iter().copied());
        for (flow, crossings) in flows.iter().enumerate() {
            fair.add(flow as u32, crossings);
        }
        fair.fill(&mut Vec::new());
        fair.flows.iter().map(|flow| flow.rate).collect()
    }

    #[test]
    fn one_link_is_shared_equally() {
        for n in [1u32, 3, 7, 1000] {
            let flows = vec![crossings(&[0]); n as usize];
            assert!(
                rates(&[10.0], &flows)
                    .iter()
                    .all(|rate| (rate * f64::from(n) / 10.0 - 1.0).abs() < 1e-12)
            );
        }
    }

    /// Bertsekas and Gallager (section 6.5.2): unused capacity goes to the other flows.
    #[test]
    fn what_one_cannot_use_others_get() {
        let flows = [crossings(&[0, 1]), crossings(&[0]), crossings(&[1]), crossings(&[1, 2])];
        assert_eq!(rates(&[10.0, 3.0, 0.5], &flows), [1.25, 8.75, 1.25, 0.5]);
    }

    #[test]
    fn a_class_takes_its_rate_as_often_as_it_crosses() {
        let many = vec![Crossing { link: 0, flows: 4.0 }, Crossing { link: 1, flows: 1.0 }];
        assert_eq!(rates(&[10.0, 1.5], &[many, crossings(&[0])]), [1.5, 4.0]);
    }

    #[test]
    fn only_what_an_event_touches_is_told() {
        let mut fair = Fair::new([8.0, 8.0]);
        let mut changed = Vec::new();
        fair.add(0, &crossings(&[0]));
        fair.add(1, &crossings(&[1]));
        fair.fill(&mut changed);
        assert_eq!(changed, [(0, 8.0), (1, 8.0)]);
        changed.clear();
        fair.add(2, &crossings(&[1]));
        assert!(fair.stale());
        fair.fill(&mut changed);
        changed.sort_by_key(|change| change.0);
        assert_eq!(changed, [(1, 4.0), (2, 4.0)]);
        changed.clear();
        fair.remove(1);
        fair.add(1, &crossings(&[1]));
        fair.fill(&mut changed);
        assert_eq!(changed, [(1, 4.0)], "one went and its like came: the other keeps its rate");
    }

    #[test]
    fn links_that_change_fill_anew() {
        let mut fair = Fair::new([8.0, 8.0]);
        let mut changed = Vec::new();
        fair.add(0, &crossings(&[0]));
        fair.add(1, &crossings(&[1]));
        fair.fill(&mut changed);
        changed.clear();
        fair.change(&[8.0, 8.0]);
        assert!(!fair.stale(), "nothing changed");
        fair.change(&[8.0, 2.0]);
        fair.fill(&mut changed);
        assert_eq!(changed, [(1, 2.0)]);
    }

    /// Generates link capacities and the links of each flow.
    fn network() -> impl Strategy<Value = (Vec<f64>, Vec<Vec<Crossing>>)> {
        let capacities = proptest::collection::vec(0.1f64..100.0, 1..12);
        capacities.prop_flat_map(|capacities| {
            let links = capacities.len() as u32;
            let flow = proptest::collection::btree_map(0..links, 1u32..4, 1..5);
            let flow = flow.prop_map(|links| {
                let crossing = |(link, flows): (u32, u32)| Crossing { link, flows: flows.into() };
                links.into_iter().map(crossing).collect()
            });
            (Just(capacities), proptest::collection::vec(flow, 1..20))
        })
    }

    proptest! {
        /// Definition: no link exceeds its capacity, and every flow has a full link on which no
        /// flow has a higher rate. Intermediate additions and removals change nothing.
        #[test]
        fn every_flow_has_a_bottleneck((capacities, flows) in network(), gone in 0usize..20) {
            let all = rates(&capacities, &flows);
            let mut load = vec![0.0; capacities.len()];
            for (crossings, rate) in flows.iter().zip(&all) {
                for crossing in crossings {
                    load[crossing.link as usize] += crossing.flows * rate;
                }
            }
            for (load, capacity) in load.iter().zip(&capacities) {
                prop_assert!(*load <= capacity * (1.0 + 1e-12), "{load} on {capacity}");
            }
            for (crossings, rate) in flows.iter().zip(&all) {
                let bottleneck = crossings.iter().any(|crossing| {
                    let link = crossing.link;
                    let most = flows.iter().zip(&all).filter(|(flow, _)| {
                        flow.iter().any(|crossing| crossing.link == link)
                    });
                    let most = most.map(|(_, rate)| *rate).fold(0.0, f64::max);
                    load[link as usize] >= capacities[link as usize] * (1.0 - 1e-12)
                        && *rate >= most * (1.0 - 1e-12)
                });
                prop_assert!(bottleneck);
            }

            let mut fair = Fair::new(capacities.iter().copied());
            for (flow, crossings) in flows.iter().enumerate() {
                fair.add(flow as u32, crossings);
                fair.fill(&mut Vec::new());
            }
            let extra = flows.len() as u32;
            fair.add(extra, &flows[gone % flows.len()]);
            fair.fill(&mut Vec::new());
            fair.remove(extra);
            fair.fill(&mut Vec::new());
            for (state, rate) in fair.flows.iter().zip(&all) {
                prop_assert!((state.rate / rate - 1.0).abs() < 1e-12);
            }
        }
    }
}
