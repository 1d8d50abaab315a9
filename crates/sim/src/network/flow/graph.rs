//! Routes through a dimension whose links are listed explicitly.

use crate::cluster::{Dimension, GraphLink};
use paceline_plan::units::Seconds;

/// Best routes from one member to all others: fewest links, then highest bandwidth, then lowest
/// latency. All equally good ones are kept.
#[derive(Debug)]
pub(super) struct Ways {
    /// Best routes to each point.
    points: Vec<Option<Point>>,
}

#[derive(Clone, Debug)]
struct Point {
    bandwidth: f64,
    latency: Seconds,
    hops: u32,
    /// Predecessors on equally good routes, each with the link number: twice the link's index, plus
    /// one if it is used backwards.
    before: Vec<(u32, u32)>,
}

impl Ways {
    /// Finds routes level by level, so that a point's best routes are final before any route
    /// continues from it.
    pub(super) fn new(
        dimension: &Dimension,
        switches: u32,
        links: &[GraphLink],
        from: u32,
    ) -> Self {
        let count = dimension.size as usize + switches as usize;
        let mut leaving: Vec<Vec<u32>> = vec![Vec::new(); count];
        for (index, link) in links.iter().enumerate() {
            for (direction, &point) in link.between.iter().enumerate() {
                if let Some(leaving) = leaving.get_mut(point as usize) {
                    leaving.push((2 * index + direction) as u32);
                }
            }
        }
        let mut points: Vec<Option<Point>> = vec![None; count];
        let start =
            Point { bandwidth: f64::INFINITY, latency: Seconds::ZERO, hops: 0, before: Vec::new() };
        if let Some(point) = points.get_mut(from as usize) {
            *point = Some(start);
        }
        let mut level = vec![from];
        while !level.is_empty() {
            let mut next = Vec::new();
            for here in level {
                let Some(so_far) = points.get(here as usize).cloned().flatten() else { continue };
                for &number in &leaving[here as usize] {
                    let link = &links[number as usize / 2];
                    let there = link.between[1 - number as usize % 2];
                    let Some(known) = points.get_mut(there as usize) else { continue };
                    let one = link.bandwidth.unwrap_or(dimension.bandwidth).0;
                    let wide = one * dimension.efficiency * f64::from(link.width);
                    let reached = Point {
                        bandwidth: so_far.bandwidth.min(wide),
                        latency: so_far.latency + link.latency.unwrap_or(dimension.latency),
                        hops: so_far.hops + 1,
                        before: vec![(here, number)],
                    };
                    match known {
                        None => {
                            *known = Some(reached);
                            next.push(there);
                        }
                        Some(known) if known.hops == reached.hops => known.join(reached),
                        Some(_) => {}
                    }
                }
            }
            level = next;
        }
        Self { points }
    }

    /// Visits the links of a route in order and returns its latency.
    pub(super) fn walk(&self, to: u32, mut link: impl FnMut(u32)) -> Option<Seconds> {
        let latency = self.points.get(to as usize)?.as_ref()?.latency;
        let mut back = Vec::new();
        let mut at = to;
        while let Some(point) = self.points.get(at as usize).and_then(Option::as_ref) {
            // Only the start has no predecessor.
            let Some(choices) = u32::try_from(point.before.len()).ok().filter(|&n| n > 0) else {
                break;
            };
            let (before, number) = point.before[(to % choices) as usize];
            back.push(number);
            at = before;
        }
        back.into_iter().rev().for_each(&mut link);
        Some(latency)
    }
}

impl Point {
    /// Keeps the better of two routes with equally many links, or both.
    fn join(&mut self, other: Self) {
        let order = self.bandwidth.total_cmp(&other.bandwidth).reverse();
        match order.then(self.latency.0.total_cmp(&other.latency.0)) {
            std::cmp::Ordering::Less => {}
            std::cmp::Ordering::Equal => self.before.extend(other.before),
            std::cmp::Ordering::Greater => *self = other,
        }
    }
}
