//! Ways through a dimension whose links are listed.

use crate::cluster::{Dimension, GraphLink};
use paceline_plan::units::Seconds;

/// The best ways from one member to all others: the fewest links; among those the widest; among
/// those the quickest. Equally good ones are all kept.
#[derive(Debug)]
pub(super) struct Ways {
    /// By point: how it is best reached, and over which links.
    points: Vec<Option<Point>>,
}

#[derive(Clone, Debug)]
struct Point {
    bandwidth: f64,
    latency: Seconds,
    hops: u32,
    /// The points just before it on an equally good way, each with the number of the link: the
    /// link's position, twice, and one more where it is used backwards.
    before: Vec<(u32, u32)>,
}

impl Ways {
    /// Points are settled a level at a time, so that a point's best ways are final before any way
    /// leads on from it.
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

    /// Names the links of a way in order and says how long the first byte takes.
    pub(super) fn walk(&self, to: u32, mut link: impl FnMut(u32)) -> Option<Seconds> {
        let latency = self.points.get(to as usize)?.as_ref()?.latency;
        let mut back = Vec::new();
        let mut at = to;
        while let Some(point) = self.points.get(at as usize).and_then(Option::as_ref) {
            // Only the start has nothing before it.
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
    /// Keeps the better of two ways with equally many links, or both.
    fn join(&mut self, other: Self) {
        let order = self.bandwidth.total_cmp(&other.bandwidth).reverse();
        match order.then(self.latency.0.total_cmp(&other.latency.0)) {
            std::cmp::Ordering::Less => {}
            std::cmp::Ordering::Equal => self.before.extend(other.before),
            std::cmp::Ordering::Greater => *self = other,
        }
    }
}
