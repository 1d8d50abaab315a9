//! Number of rings that fit into a host with directly connected GPUs, such as a hybrid cube mesh.
//!
//! A ring visits every member once over NVLinks, and no two rings use the same link in the same
//! direction. A ring in one direction leaves room for its mirror image in the other. Rings are
//! therefore packed as closed walks over undirected links, each of which counts as two rings. This
//! is the search of `src/graph/search.cc` (`ncclTopoSearchRec`) with its result in closed form.
//!
//! If direct links close no ring, as among the first five GPUs of a DGX-1, a hop may pass through
//! another member's memory (`PATH_NVB` in `src/graph/topo.h`).

use crate::cluster::{Dimension, GraphLink};

/// Returns the number of rings among the devices at these positions and their total bandwidth in
/// bytes per second; `None` if no ring reaches all.
pub(super) fn pack(
    places: &[u32],
    links: &[GraphLink],
    dimension: &Dimension,
) -> Option<(u32, f64)> {
    let wires = LinkMatrix::among(places, links, dimension);
    let (rings, slowest) = match places.len() {
        0 | 1 => return None,
        // There and back over the same link: one ring that is its own mirror image.
        2 => (wires.width[1], wires.rate[1]),
        _ => {
            let direct = wires.most_walks(false).map(|found| (found, 1.0));
            let relayed = || wires.most_walks(true).map(|found| (found, RELAYED));
            let (Found { walks, slowest }, share) = direct.or_else(relayed)?;
            ((walks.len() as u32).saturating_mul(2), slowest * share)
        }
    };
    (rings > 0).then(|| (rings, slowest * f64::from(rings)))
}

/// Returns closed walks through all members of a graph of devices that share no link; none if a hop
/// would have to pass through another member.
pub(in crate::network) fn walks(
    size: u32,
    links: &[GraphLink],
    dimension: &Dimension,
) -> Vec<Vec<u32>> {
    let places: Vec<u32> = (0..size).collect();
    let found = match places.len() {
        0..=2 => None,
        _ => {
            // Two ranks exchange one message in a round, however many links join them.
            let mut wires = LinkMatrix::among(&places, links, dimension);
            wires.width.iter_mut().for_each(|width| *width = (*width).min(1));
            wires.most_walks(false)
        }
    };
    let walks = found.map_or(Vec::new(), |found| found.walks);
    walks.into_iter().map(|walk| walk.into_iter().map(|place| place as u32).collect()).collect()
}

/// Fraction of link bandwidth left for a hop through a third GPU's memory.
///
/// The sender writes there and the receiver reads from there (`p2pSendSetup` in
/// `src/transport/p2p.cc`). A read takes a 16-byte flit for its request, in the same direction in
/// which the ring's own data leaves the receiver. 128 bytes of data then take ten flits instead of
/// nine (eight of data and a header; Foley and Danskin, "Ultra-Performance Pascal GPU and NVLink
/// Interconnect", IEEE Micro 37(2), 2017).
const RELAYED: f64 = 9.0 / 10.0;

/// Maximum number of walk extensions before the search accepts its best result. A host of eight
/// needs a few thousand.
const MAX_EXTENSIONS: u32 = 200_000;

/// Largest number of closed walks found, and the slowest link that any of them uses.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    walks: Vec<Vec<usize>>,
    slowest: f64,
}

/// Links between members, as a matrix.
struct LinkMatrix {
    members: usize,
    /// Number of parallel links.
    width: Vec<u32>,
    /// Bandwidth of one of them.
    rate: Vec<f64>,
}

impl LinkMatrix {
    fn among(places: &[u32], links: &[GraphLink], dimension: &Dimension) -> Self {
        let members = places.len();
        let mut wires = Self {
            members,
            width: vec![0; members * members],
            rate: vec![f64::INFINITY; members * members],
        };
        let index = |point: u32| places.iter().position(|&place| place == point);
        for link in links {
            let [Some(a), Some(b)] = link.between.map(index) else { continue };
            let one = link.bandwidth.unwrap_or(dimension.bandwidth).0 * dimension.efficiency;
            for at in [a * members + b, b * members + a] {
                wires.width[at] = wires.width[at].saturating_add(link.width);
                wires.rate[at] = wires.rate[at].min(one);
            }
        }
        wires
    }

    /// Finds the largest set of closed walks that share no link.
    fn most_walks(&self, relays: bool) -> Option<Found> {
        let degree = |member: usize| {
            self.width[member * self.members..][..self.members]
                .iter()
                .fold(0u32, |sum, &width| sum.saturating_add(width))
        };
        let bound = (0..self.members).map(degree).min()? / 2;
        let mut search = Search {
            wires: self,
            relays,
            bound,
            free: self.width.clone(),
            walk: vec![0],
            done: Vec::new(),
            slowest: f64::INFINITY,
            best: None,
            timeout: MAX_EXTENSIONS,
        };
        search.extend();
        search.best
    }
}

/// Depth-first search for closed walks, one after the other.
struct Search<'a> {
    wires: &'a LinkMatrix,
    relays: bool,
    /// Maximum number of walks through the member with the fewest links.
    bound: u32,
    free: Vec<u32>,
    /// Current walk, from member 0.
    walk: Vec<usize>,
    /// Completed walks, in lexicographic order (duplicates allowed), so that no set is tried twice.
    done: Vec<Vec<usize>>,
    slowest: f64,
    best: Option<Found>,
    timeout: u32,
}

impl Search<'_> {
    /// Extends the current walk by one hop in every possible way.
    fn extend(&mut self) {
        let here = *self.walk.last().unwrap_or(&0);
        if self.walk.len() == self.wires.members {
            return self.hop(here, 0);
        }
        for there in 1..self.wires.members {
            if !self.walk.contains(&there) {
                self.hop(here, there);
            }
        }
    }

    /// Hops from one member to another: over their own link, or through a third.
    fn hop(&mut self, from: usize, to: usize) {
        let enough = self.best.as_ref().is_some_and(|best| best.walks.len() >= self.bound as usize);
        if enough || self.timeout == 0 {
            return;
        }
        self.timeout -= 1;
        if self.is_free(from, to) {
            self.over(&[(from, to)], to);
        }
        let thirds = if self.relays { 0..self.wires.members } else { 0..0 };
        for third in thirds.filter(|&third| third != from && third != to) {
            if self.is_free(from, third) && self.is_free(third, to) {
                self.over(&[(from, third), (third, to)], to);
            }
        }
    }

    /// Takes links, continues the search from there, and releases them.
    fn over(&mut self, links: &[(usize, usize)], to: usize) {
        let before = self.slowest;
        for &(a, b) in links {
            self.take(a, b, 1);
            self.slowest = self.slowest.min(self.wires.rate[a * self.wires.members + b]);
        }
        if to == 0 {
            self.close();
        } else {
            self.walk.push(to);
            self.extend();
            self.walk.pop();
        }
        for &(a, b) in links {
            self.take(a, b, -1);
        }
        self.slowest = before;
    }

    /// Counts a walk that returned to its start, and begins the next.
    fn close(&mut self) {
        if self.done.last().is_some_and(|last| *last > self.walk) {
            return;
        }
        let walk = std::mem::replace(&mut self.walk, vec![0]);
        self.done.push(walk);
        if self.best.as_ref().is_none_or(|best| self.done.len() > best.walks.len()) {
            self.best = Some(Found { walks: self.done.clone(), slowest: self.slowest });
        }
        self.extend();
        self.walk = self.done.pop().unwrap_or_default();
    }

    fn is_free(&self, a: usize, b: usize) -> bool {
        self.free[a * self.wires.members + b] > 0
    }

    fn take(&mut self, a: usize, b: usize, count: i32) {
        for at in [a * self.wires.members + b, b * self.wires.members + a] {
            self.free[at] = self.free[at].saturating_add_signed(-count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{DimensionKind, preset};
    use proptest::prelude::*;

    fn cube_mesh() -> Dimension {
        preset::get("dgx1-v100").unwrap().dimensions.swap_remove(0)
    }

    fn rings(dimension: &Dimension, places: &[u32]) -> Option<(u32, f64)> {
        let DimensionKind::Graph { links, .. } = &dimension.kind else { panic!("a graph") };
        pack(places, links, dimension)
    }

    /// Six links per GPU give six rings of all eight. With fewer GPUs, the one with the fewest
    /// links to the others limits the number.
    #[test]
    fn a_cube_mesh_has_as_many_rings_as_its_poorest_member_has_links() {
        let mesh = cube_mesh();
        let link = mesh.achievable().0;
        let count = |gpus: u32| {
            let places: Vec<u32> = (0..gpus).collect();
            let (rings, rate) = rings(&mesh, &places).unwrap();
            (rings, (rate / link / f64::from(rings) * 1e6).round() / 1e6)
        };
        assert_eq!(count(2), (1, 1.0));
        assert_eq!(count(3), (2, 1.0));
        assert_eq!(count(4), (4, 1.0));
        assert_eq!(count(5), (2, RELAYED), "GPU 4 has links to GPU 0 alone");
        assert_eq!(count(6), (2, 1.0), "a single link joins GPUs 4 and 5");
        assert_eq!(count(7), (4, 1.0));
        assert_eq!(count(8), (6, 1.0));
        assert_eq!(rings(&mesh, &[0, 3]).unwrap().0, 2, "two links in parallel");
        assert_eq!(rings(&mesh, &[0, 5]), None, "no link at all");
        assert_eq!(rings(&mesh, &[2]), None);
    }

    #[test]
    fn a_slower_link_slows_all_rings() {
        let mut mesh = cube_mesh();
        let places = [0, 1, 2, 3];
        let fast = rings(&mesh, &places).unwrap();
        let bandwidth = mesh.bandwidth;
        if let DimensionKind::Graph { links, .. } = &mut mesh.kind {
            links[0].bandwidth = Some(paceline_plan::units::BytesPerSec(bandwidth.0 / 4.0));
        }
        let slow = rings(&mesh, &places).unwrap();
        assert_eq!(slow.0, fast.0);
        assert!((slow.1 / fast.1 - 0.25).abs() < 1e-12);
    }

    proptest! {
        /// For any graph, the search terminates, and the rings fit into every member's links.
        #[test]
        fn rings_never_exceed_what_a_member_has(
            members in 3u32..10,
            wires in prop::collection::vec((0u32..10, 0u32..10, 0u32..4), 0..30),
        ) {
            let links: Vec<GraphLink> = wires
                .into_iter()
                .filter(|(a, b, _)| a != b)
                .map(|(a, b, width)| GraphLink { between: [a, b], width, bandwidth: None, latency: None })
                .collect();
            let places: Vec<u32> = (0..members).collect();
            if let Some((rings, rate)) = pack(&places, &links, &cube_mesh()) {
                let poorest = places.iter().map(|&place| {
                    let inside = |link: &&GraphLink| {
                        link.between.contains(&place) && link.between.iter().all(|&p| p < members)
                    };
                    links.iter().filter(inside).map(|link| link.width).sum::<u32>()
                });
                prop_assert!(rings <= poorest.min().unwrap_or(0));
                prop_assert!(rate > 0.0 && rate.is_finite());
            }
        }
    }
}
