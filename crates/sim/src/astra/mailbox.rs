//! Matching of posted receives and arrived messages.

use super::exchange::Labels;
use super::schedule::{Phase, Work};

/// Mailboxes of all ranks, chunks and phases. A chunk may arrive at a rank that has not reached its
/// phase yet.
#[derive(Debug)]
pub(super) struct Mailboxes {
    /// Label scheme of each phase.
    labels: Vec<Labels>,
    /// One word per mailbox. One label: messages minus receives. Labels that occur once: bits of
    /// labels seen from either side. Others: the number of a page, 0 for none.
    words: Vec<u64>,
    /// Messages minus receives, by label. Page 0 is unused.
    pages: Vec<Vec<i8>>,
    unused: Vec<u64>,
    chunks: usize,
}

/// The mailbox of a chunk in a phase at a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) chunk: u32,
    pub(super) phase: u8,
}

impl Mailboxes {
    pub(super) fn new(ranks: u32, chunks: u32, phases: &[Phase]) -> Mailboxes {
        let labels: Vec<Labels> = phases
            .iter()
            .map(|phase| match &phase.work {
                Work::Exchange(exchange) => exchange.labels(),
                Work::Tree(_) => Labels::Once,
            })
            .collect();
        let words = vec![0; ranks as usize * chunks as usize * phases.len()];
        let (pages, unused) = (vec![Vec::new()], Vec::new());
        Mailboxes { labels, words, pages, unused, chunks: chunks as usize }
    }

    /// Records a message. Returns true if a receive was waiting; otherwise the message waits.
    pub(super) fn arrive(&mut self, place: Place, label: u32) -> bool {
        self.meet(place, label, 1)
    }

    /// Posts a receive. Returns true if its message was waiting; otherwise the receive waits.
    pub(super) fn post(&mut self, place: Place, label: u32) -> bool {
        self.meet(place, label, -1)
    }

    /// Releases the page of a phase. By then every message has been matched.
    pub(super) fn end(&mut self, place: Place) {
        let word = self.word(place);
        match self.labels[place.phase as usize] {
            Labels::One | Labels::Once => {}
            Labels::Often(_) => {
                let page = std::mem::take(&mut self.words[word]);
                if page != 0 {
                    self.unused.push(page);
                }
            }
        }
    }

    fn meet(&mut self, place: Place, label: u32, side: i8) -> bool {
        let word = self.word(place);
        let word = &mut self.words[word];
        match self.labels[place.phase as usize] {
            Labels::One => {
                let balance = word.cast_signed();
                *word = (balance + i64::from(side)).cast_unsigned();
                balance * i64::from(side) < 0
            }
            Labels::Once => {
                // Each side occurs once, so the one that finds the bit set is the second.
                let bit = 1 << label;
                let met = *word & bit != 0;
                *word |= bit;
                met
            }
            Labels::Often(labels) => {
                if *word == 0 {
                    *word = self.unused.pop().unwrap_or_else(|| {
                        self.pages.push(Vec::new());
                        self.pages.len() as u64 - 1
                    });
                    let page = &mut self.pages[*word as usize];
                    page.clear();
                    page.resize(labels as usize, 0);
                }
                let balance = &mut self.pages[*word as usize][label as usize];
                let met = *balance * side < 0;
                *balance += side;
                met
            }
        }
    }

    fn word(&self, place: Place) -> usize {
        let lane = place.rank as usize * self.chunks + place.chunk as usize;
        lane * self.labels.len() + place.phase as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn boxes(labels: Labels) -> Mailboxes {
        let (pages, unused) = (vec![Vec::new()], Vec::new());
        Mailboxes { labels: vec![labels], words: vec![0; 2], pages, unused, chunks: 1 }
    }

    const HERE: Place = Place { rank: 0, chunk: 0, phase: 0 };
    const THERE: Place = Place { rank: 1, chunk: 0, phase: 0 };

    #[test]
    fn whoever_comes_second_is_told() {
        for labels in [Labels::One, Labels::Once, Labels::Often(4)] {
            let mut boxes = boxes(labels);
            assert!(!boxes.arrive(HERE, 0));
            assert!(!boxes.post(THERE, 0));
            assert!(boxes.post(HERE, 0));
            assert!(boxes.arrive(THERE, 0));
        }
    }

    #[test]
    fn pages_are_used_again() {
        let mut boxes = boxes(Labels::Often(2));
        for _ in 0..3 {
            assert!(!boxes.post(HERE, 1));
            assert!(boxes.arrive(HERE, 1));
            boxes.end(HERE);
        }
        assert_eq!(boxes.pages.len(), 2);
    }

    proptest! {
        /// Each message matches one receive, as soon as both exist.
        #[test]
        fn as_many_meet_as_there_are_of_both(sides in prop::collection::vec((any::<bool>(), 0..3u32), 0..60)) {
            let mut boxes = boxes(Labels::Often(3));
            let mut seen = [(0, 0, 0); 3];
            for (arrives, label) in sides {
                let met =
                    if arrives { boxes.arrive(HERE, label) } else { boxes.post(HERE, label) };
                let (arrived, posted, both) = &mut seen[label as usize];
                *arrived += u32::from(arrives);
                *posted += u32::from(!arrives);
                *both += u32::from(met);
                prop_assert_eq!(*both, *arrived.min(posted));
            }
        }
    }
}
