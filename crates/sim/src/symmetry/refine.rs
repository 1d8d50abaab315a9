//! Colour refinement: finds indistinguishable points of a graph.
//!
//! A partition is *equitable* if any two points of a class have equally many neighbours in every
//! class. The simulation may fold by the coarsest one that refines the given colours: points of a
//! class do the same at the same time, because everything they depend on does.
//!
//! (An equitable partition; Berkholz, Bonsma and Grohe, "Tight lower and upper bounds for the
//! complexity of canonical colour refinement", 2017.)
//!
//! The partition is split by one class at a time. Of the parts of a split class, all but the
//! largest are used to split others in turn, so no edge is visited more than log n times (Cardon
//! and Crochemore, "Partitioning a graph in O(|A| log₂ |V|)", 1982).

/// Graph with two kinds of edges.
#[derive(Debug)]
pub(crate) struct Graph {
    /// Offset of each point's neighbours in `neighbours`, plus the total length as last entry.
    first: Vec<u32>,
    /// Neighbours with the edge kind.
    neighbours: Vec<(u32, EdgeKind)>,
}

/// Kind of an edge, the same from both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EdgeKind {
    /// Edge to an owner, a group, a crossed link, or the receiver of a message.
    Plain,
    /// Edge to the sender of a message.
    Sender,
}

impl EdgeKind {
    /// Increment whose sum counts the edges of both kinds separately.
    const fn unit(self) -> u64 {
        match self {
            Self::Plain => 1,
            Self::Sender => 1 << 32,
        }
    }
}

impl Graph {
    /// Builds a graph of `points` points.
    pub(crate) fn new(points: usize, edges: &[(u32, u32, EdgeKind)]) -> Self {
        let mut first = vec![0u32; points + 1];
        for &(a, b, _) in edges {
            first[a as usize] += 1;
            first[b as usize] += 1;
        }
        let mut end = 0;
        for first in &mut first {
            end += *first;
            *first = end;
        }
        let mut neighbours = vec![(0, EdgeKind::Plain); 2 * edges.len()];
        for &(a, b, kind) in edges.iter().rev() {
            for (here, there) in [(a, b), (b, a)] {
                let place = &mut first[here as usize];
                *place -= 1;
                neighbours[*place as usize] = (there, kind);
            }
        }
        Self { first, neighbours }
    }

    /// Neighbours of a point.
    pub(crate) fn neighbours(&self, point: u32) -> &[(u32, EdgeKind)] {
        let range = self.first[point as usize] as usize..self.first[point as usize + 1] as usize;
        &self.neighbours[range]
    }

    /// Class of every point in the coarsest equitable partition that refines the colours.
    pub(crate) fn classes(&self, colours: &[u32]) -> Vec<u32> {
        let mut partition = Partition::new(colours);
        let mut counts = vec![0u64; colours.len()];
        let mut counted: Vec<u32> = Vec::new();
        while let Some(class) = partition.splitters.pop() {
            partition.classes[class as usize].splits = false;
            let Class { start, len, .. } = partition.classes[class as usize];
            for &point in &partition.points[start as usize..][..len as usize] {
                for &(neighbour, kind) in self.neighbours(point) {
                    let count = &mut counts[neighbour as usize];
                    if *count == 0 {
                        counted.push(neighbour);
                    }
                    *count += kind.unit();
                }
            }
            partition.split(&mut counted, &counts);
            for point in counted.drain(..) {
                counts[point as usize] = 0;
            }
        }
        partition.class
    }
}

struct Partition {
    /// Points, sorted by class.
    points: Vec<u32>,
    /// Position of each point in `points`.
    place: Vec<u32>,
    class: Vec<u32>,
    classes: Vec<Class>,
    /// Classes that are still to be used as splitters.
    splitters: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Class {
    start: u32,
    len: u32,
    /// True if it is among the splitters.
    splits: bool,
}

impl Partition {
    fn new(colours: &[u32]) -> Self {
        let mut points: Vec<u32> = (0..colours.len() as u32).collect();
        points.sort_by_key(|&point| colours[point as usize]);
        let mut place = vec![0; points.len()];
        let mut class = vec![0; points.len()];
        let mut classes: Vec<Class> = Vec::new();
        let same = |a: &u32, b: &u32| colours[*a as usize] == colours[*b as usize];
        let mut start = 0;
        for run in points.chunk_by(same) {
            for (index, &point) in run.iter().enumerate() {
                place[point as usize] = start + index as u32;
                class[point as usize] = classes.len() as u32;
            }
            classes.push(Class { start, len: run.len() as u32, splits: true });
            start += run.len() as u32;
        }
        let splitters = (0..classes.len() as u32).rev().collect();
        Self { points, place, class, classes, splitters }
    }

    /// Splits every class by its points' counts; points not in `counted` have count 0.
    fn split(&mut self, counted: &mut [u32], counts: &[u64]) {
        counted.sort_unstable_by_key(|&point| {
            (self.class[point as usize], counts[point as usize], point)
        });
        let class = std::mem::take(&mut self.class);
        let same = |a: &u32, b: &u32| class[*a as usize] == class[*b as usize];
        let runs: Vec<(u32, usize)> =
            counted.chunk_by(same).map(|run| (class[run[0] as usize], run.len())).collect();
        self.class = class;
        let mut rest = &*counted;
        for (class, len) in runs {
            let (run, others) = rest.split_at(len);
            rest = others;
            self.split_class(class, run, counts);
        }
    }

    /// Splits one class; `listed` are its points with non-zero count, sorted by count.
    fn split_class(&mut self, class: u32, listed: &[u32], counts: &[u64]) {
        let Class { start, len, .. } = self.classes[class as usize];
        let silent = len - listed.len() as u32;
        let count = |point: u32| counts[point as usize];
        let same = |a: &u32, b: &u32| count(*a) == count(*b);
        if silent == 0 && count(listed[0]) == count(listed[listed.len() - 1]) {
            return;
        }
        // Moves listed points behind those with count 0, which stay one part. Each swap puts one
        // point in its final position and moves only points that are still to come or have count 0.
        for (index, &point) in listed.iter().enumerate().rev() {
            self.swap(self.place[point as usize], start + silent + index as u32);
        }
        let mut parts: Vec<(u32, u32)> = Vec::new();
        if silent > 0 {
            parts.push((start, silent));
        }
        let mut at = start + silent;
        for part in listed.chunk_by(same) {
            parts.push((at, part.len() as u32));
            at += part.len() as u32;
        }
        let largest = (0..parts.len()).rev().max_by_key(|&part| parts[part].1).unwrap_or(0);
        for (index, (start, len)) in parts.into_iter().enumerate() {
            if index == largest {
                let kept = &mut self.classes[class as usize];
                (kept.start, kept.len) = (start, len);
                continue;
            }
            let new = self.classes.len() as u32;
            self.classes.push(Class { start, len, splits: true });
            self.splitters.push(new);
            for &point in &self.points[start as usize..][..len as usize] {
                self.class[point as usize] = new;
            }
        }
    }

    fn swap(&mut self, a: u32, b: u32) {
        self.points.swap(a as usize, b as usize);
        self.place[self.points[a as usize] as usize] = a;
        self.place[self.points[b as usize] as usize] = b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EdgeKind::{Plain, Sender};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn count(classes: &[u32]) -> usize {
        let mut distinct = classes.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.len()
    }

    #[test]
    fn a_circle_looks_alike_everywhere_and_a_path_from_its_ends() {
        let circle: Vec<_> = (0..12).map(|i| (i, (i + 1) % 12, Plain)).collect();
        assert_eq!(count(&Graph::new(12, &circle).classes(&[0; 12])), 1);
        let path: Vec<_> = (0..11).map(|i| (i, i + 1, Plain)).collect();
        let classes = Graph::new(12, &path).classes(&[0; 12]);
        assert_eq!(count(&classes), 6);
        assert!((0..12).all(|i| classes[i] == classes[11 - i]));
    }

    #[test]
    fn colours_and_kinds_of_edges_tell_points_apart() {
        let circle: Vec<_> = (0..6).map(|i| (i, (i + 1) % 6, Plain)).collect();
        let graph = Graph::new(6, &circle);
        assert_eq!(count(&graph.classes(&[1, 0, 0, 0, 0, 0])), 4);
        let star = [(0, 1, Plain), (0, 2, Plain), (0, 3, Sender)];
        let classes = Graph::new(4, &star).classes(&[0; 4]);
        assert_eq!((classes[1] == classes[2], classes[2] == classes[3]), (true, false));
        assert_eq!(Graph::new(0, &[]).classes(&[]), Vec::<u32>::new());
    }

    /// Distinguishes points by their neighbours' classes repeatedly until nothing changes.
    fn by_definition(graph: &Graph, colours: &[u32]) -> Vec<u32> {
        let mut class = colours.to_vec();
        loop {
            let mut known = BTreeMap::new();
            let mut next = Vec::new();
            for point in 0..colours.len() as u32 {
                let neighbours = graph.neighbours(point).iter();
                let mut seen: Vec<_> =
                    neighbours.map(|&(there, kind)| (class[there as usize], kind)).collect();
                seen.sort_unstable();
                let all = known.len() as u32;
                next.push(*known.entry((class[point as usize], seen)).or_insert(all));
            }
            if count(&next) == count(&class) {
                return next;
            }
            class = next;
        }
    }

    proptest! {
        #[test]
        fn the_partition_is_the_coarsest_equitable_one(
            points in 1u32..30,
            edges in proptest::collection::vec((0u32..30, 0u32..30, any::<bool>()), 0..60),
            colours in proptest::collection::vec(0u32..3, 30),
        ) {
            let kind = |sender| if sender { Sender } else { Plain };
            let edges: Vec<_> = edges.into_iter()
                .map(|(a, b, sender)| (a % points, b % points, kind(sender)))
                .collect();
            let graph = Graph::new(points as usize, &edges);
            let colours = &colours[..points as usize];
            let (fast, plain) = (graph.classes(colours), by_definition(&graph, colours));
            for a in 0..points as usize {
                for b in 0..a {
                    prop_assert_eq!(fast[a] == fast[b], plain[a] == plain[b]);
                }
            }
        }
    }
}
