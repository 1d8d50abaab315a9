//! The rings of a multi-ring: how many there are, and in which order each visits the ranks.

use super::definition::Words;
use super::gcd;
use std::fmt;

/// Maximum number of rings that share a vector; no device has this number of links.
pub const MAX_RINGS: u32 = 256;

/// Number of rings, and where they run.
///
/// Without hosts, ring 0 visits ranks in order and ring 1 backwards; ring 2 goes to the *s*-th next
/// rank, for the smallest *s* > 1 that still visits every rank, and ring 3 does the same backwards.
///
/// With hosts of *g* consecutive ranks, a ring visits one host after the other and all members of
/// each. Rings come in pairs, the second of which runs backwards. Each pair has an order of a host's
/// members of its own. Orders of a graph are those that [`with_orders`](Self::with_orders) got: paths
/// that share no link. Otherwise they are zigzags, *k*, *k* + 1, *k* − 1, *k* + 2 and so on, which
/// share no pair of neighbours, and end at members of their own: rings leave a host at as many members.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RingSet {
    /// The number of rings and of a host's members, 0 without hosts; then two orders to a word.
    words: Words,
}

impl RingSet {
    /// Maximum number of members of a host whose orders can be given: an order's number has 16 bits.
    pub const MAX_ORDERED: u32 = 8;
    /// Maximum number of orders.
    pub const MAX_ORDERS: usize = 10;

    /// Rings without hosts.
    pub const fn new(rings: u32) -> Self {
        Self { words: [rings, 0, 0, 0, 0, 0] }
    }

    /// The number of rings that is asked for; a group may have room for fewer.
    pub const fn count(self) -> u32 {
        self.words[0] & 0xffff
    }

    /// Number of consecutive ranks that share a host, if rings go from host to host.
    pub const fn host(self) -> Option<u32> {
        match self.words[0] >> 16 {
            0 => None,
            host => Some(host),
        }
    }

    /// The same number of rings over hosts of consecutive ranks; unchanged if hosts are too large.
    pub fn over_hosts(self, host: u32) -> Self {
        match u16::try_from(host) {
            Ok(host) => Self { words: [self.count() | u32::from(host) << 16, 0, 0, 0, 0, 0] },
            Err(_) => self,
        }
    }

    /// Rings over hosts whose members are visited in these orders, one for every two rings. `None` if
    /// they are too many, not orders of at most eight members, or share neighbours.
    pub fn with_orders(self, orders: &[Vec<u32>]) -> Option<Self> {
        let host = u32::try_from(orders.first()?.len()).ok()?;
        if host > Self::MAX_ORDERED || orders.len() > Self::MAX_ORDERS {
            return None;
        }
        let mut set = self.over_hosts(host);
        let mut known: Vec<[u32; 2]> = Vec::new();
        for pair in orders.iter().flat_map(|order| order.windows(2)) {
            let pair = [pair[0].min(pair[1]), pair[0].max(pair[1])];
            if known.contains(&pair) {
                return None;
            }
            known.push(pair);
        }
        for (index, order) in orders.iter().enumerate() {
            let number = number_of(order, host)? + 1;
            set.words[1 + index / 2] |= number << (16 * (index % 2));
        }
        Some(set)
    }

    /// The orders that were given.
    pub fn orders(self) -> Vec<Vec<u32>> {
        let numbers = self.words[1..].iter().flat_map(|&word| [word & 0xffff, word >> 16]);
        let host = self.host().unwrap_or(0);
        numbers.take_while(|&number| number > 0).map(|number| order_of(number - 1, host)).collect()
    }

    pub(super) const fn words(self) -> Words {
        self.words
    }

    pub(super) fn of_words(words: Words) -> Option<Self> {
        let set = Self { words };
        let given = set.orders();
        let same = match given.is_empty() {
            true => set.words[1..] == [0; 5],
            false => Self::new(set.count()).with_orders(&given) == Some(set),
        };
        same.then_some(set)
    }

    /// Parses `C`, `C/G` or `C/G@order,order`, where an order has one digit for each member.
    pub(super) fn parse(word: &str) -> Option<Self> {
        let (count, rest) = match word.split_once('/') {
            Some((count, rest)) => (count, Some(rest)),
            None => (word, None),
        };
        let count = count.parse().ok().filter(|count| (1..=MAX_RINGS).contains(count))?;
        let set = Self::new(count);
        let Some(rest) = rest else { return Some(set) };
        let (host, orders) = match rest.split_once('@') {
            Some((host, orders)) => (host, Some(orders)),
            None => (rest, None),
        };
        let host: u32 = host.parse().ok().filter(|host| (1..=0xffff).contains(host))?;
        let Some(orders) = orders else { return Some(set.over_hosts(host)) };
        let order = |text: &str| text.chars().map(|digit| digit.to_digit(10)).collect();
        let orders: Option<Vec<Vec<u32>>> = orders.split(',').map(order).collect();
        set.with_orders(&orders?).filter(|set| set.host() == Some(host))
    }

    /// Returns true if no two rings take the same link of a group: all but those from the end of an
    /// order to its beginning always differ.
    pub(super) fn is_apart(self, ranks: u32) -> bool {
        let orders = self.orders();
        let one_host = self.host() == Some(ranks);
        let ends = |order: &Vec<u32>| Some([*order.first()?, *order.last()?]);
        let ends: Vec<[u32; 2]> = orders.iter().filter_map(ends).collect();
        let inner = orders.iter().flat_map(|order| order.windows(2));
        let mut inner = inner.map(|pair| [pair[0], pair[1]]);
        let same = |a: [u32; 2], b: [u32; 2]| a == b || a == [b[1], b[0]];
        let closes = |pair: [u32; 2]| ends.iter().any(|&end| same(end, pair));
        let twice = (0..ends.len()).any(|at| ends[..at].iter().any(|&end| same(end, ends[at])));
        !(twice || one_host && ranks > 2 && inner.any(closes))
    }

    /// The routes of the rings in a group, as many as it has room for.
    pub(super) fn routes(self, ranks: u32) -> Vec<Route> {
        match self.host().filter(|&host| host < ranks || !self.orders().is_empty()) {
            Some(host) => self.through_hosts(ranks, host),
            None => {
                let count = self.count().min(ranks - 1) as usize;
                let halves = (1..ranks).take_while(|stride| 2 * stride <= ranks);
                let strides = halves.filter(|&stride| gcd(stride, ranks) == 1);
                let both = strides.flat_map(|stride| [stride, ranks - stride]);
                // Two ranks have only one ring, identical in both directions.
                let route =
                    |stride| Route::Strided { stride, inverse: inverse(stride, ranks), ranks };
                both.take(count).map(route).collect()
            }
        }
    }

    fn through_hosts(self, ranks: u32, host: u32) -> Vec<Route> {
        let mut orders = self.orders();
        let one_way = ranks <= 2;
        if orders.is_empty() {
            let pairs = self.count().div_ceil(2).min((host / 2).max(1));
            // Spread over the members, so that neighbours that share a port do not both send.
            let first = |pair: u32| pair * (host / 2).max(1) / pairs;
            orders = (0..pairs).map(|pair| zigzag(first(pair), host)).collect();
        }
        let ways = if one_way { 1 } else { 2 };
        let routes = orders.into_iter().flat_map(|order| {
            let mut place = vec![0; order.len()];
            (0..).zip(&order).for_each(|(at, &member)| place[member as usize] = at);
            [false, true].into_iter().take(ways).map(move |back| Route::Hosts {
                order: order.clone(),
                place: place.clone(),
                back,
                ranks,
            })
        });
        routes.take(self.count() as usize).collect()
    }
}

/// Order in which a ring visits the ranks of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Always to the rank that many places ahead.
    Strided { stride: u32, inverse: u32, ranks: u32 },
    /// Host by host, each in one order of its members, or all of it backwards.
    Hosts { order: Vec<u32>, place: Vec<u32>, back: bool, ranks: u32 },
}

impl Route {
    /// Place of a rank on the ring.
    pub(super) fn place(&self, rank: u32) -> u32 {
        match self {
            Self::Strided { inverse, ranks, .. } => times(rank, *inverse, *ranks),
            Self::Hosts { order, place, back, ranks } => {
                let host = order.len() as u32;
                let at = rank / host * host + place[(rank % host) as usize];
                if *back { ranks - 1 - at } else { at }
            }
        }
    }

    /// The rank at a place, counted around the ring.
    pub(super) fn rank(&self, place: u32) -> u32 {
        match self {
            Self::Strided { stride, ranks, .. } => times(place, *stride, *ranks),
            Self::Hosts { order, back, ranks, .. } => {
                let (at, host) = (place % ranks, order.len() as u32);
                let at = if *back { ranks - 1 - at } else { at };
                at / host * host + order[(at % host) as usize]
            }
        }
    }
}

/// A path through all members that goes back and forth around one; two of them share no neighbours.
fn zigzag(first: u32, members: u32) -> Vec<u32> {
    let step = |at: u32| {
        let distance = at.div_ceil(2);
        if at % 2 == 1 { first + distance } else { first + members - distance }
    };
    (0..members).map(|at| step(at) % members).collect()
}

/// Number of an order among all orders of its members: digits in the factorial base.
fn number_of(order: &[u32], members: u32) -> Option<u32> {
    let mut left: Vec<u32> = (0..members).collect();
    if order.len() != left.len() {
        return None;
    }
    order.iter().try_fold(0u32, |number, member| {
        let index = left.iter().position(|known| known == member)?;
        let radix = left.len() as u32;
        left.remove(index);
        Some(number * radix + index as u32)
    })
}

fn order_of(mut number: u32, members: u32) -> Vec<u32> {
    let mut digits: Vec<usize> = (1..=members)
        .map(|radix| {
            let digit = number % radix;
            number /= radix;
            digit as usize
        })
        .collect();
    digits.reverse();
    let mut left: Vec<u32> = (0..members).collect();
    digits.into_iter().map(|digit| left.remove(digit)).collect()
}

/// a·b modulo m.
fn times(a: u32, b: u32, m: u32) -> u32 {
    (u64::from(a) * u64::from(b) % u64::from(m)) as u32
}

/// Multiplicative inverse of `a` modulo `m`; exists if both are coprime.
fn inverse(a: u32, m: u32) -> u32 {
    // Extended Euclid; `x·a ≡ r` holds for both pairs.
    let (mut r, mut next_r) = (i64::from(m), i64::from(a % m));
    let (mut x, mut next_x) = (0i64, 1i64);
    while next_r != 0 {
        let quotient = r / next_r;
        (r, next_r) = (next_r, r - quotient * next_r);
        (x, next_x) = (next_x, x - quotient * next_x);
    }
    x.rem_euclid(i64::from(m)) as u32
}

impl fmt::Display for RingSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.count())?;
        if let Some(host) = self.host() {
            write!(f, "/{host}")?;
        }
        for (index, order) in self.orders().iter().enumerate() {
            f.write_str(if index == 0 { "@" } else { "," })?;
            order.iter().try_for_each(|member| write!(f, "{member}"))?;
        }
        Ok(())
    }
}

impl fmt::Debug for RingSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn visited(route: &Route, ranks: u32) -> Vec<u32> {
        let order: Vec<u32> = (0..ranks).map(|place| route.rank(place)).collect();
        for (place, &rank) in (0..).zip(&order) {
            assert_eq!(route.place(rank), place, "{route:?}");
        }
        assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), ranks as usize, "{route:?}");
        order
    }

    #[test]
    fn directions_alternate_and_every_ring_visits_everyone() {
        let second = |ranks, rings| -> Vec<u32> {
            RingSet::new(rings).routes(ranks).iter().map(|route| route.rank(1)).collect()
        };
        assert_eq!(second(8, 9), [1, 7, 3, 5]);
        assert_eq!(second(5, 3), [1, 4, 2]);
        assert_eq!(second(2, 4), [1]);
        assert!(second(1, 4).is_empty());
        for ranks in 2..60 {
            RingSet::new(MAX_RINGS).routes(ranks).iter().for_each(|route| {
                visited(route, ranks);
            });
        }
    }

    /// No two rings send from one rank to the same other, and every ring leaves a host elsewhere.
    #[test]
    fn rings_over_hosts_share_neither_neighbours_nor_exits() {
        for host in 1..=9 {
            for hosts in 2..=4 {
                for rings in 1..=10 {
                    let ranks = host * hosts;
                    let routes = RingSet::new(rings).over_hosts(host).routes(ranks);
                    assert!(!routes.is_empty() && routes.len() <= rings as usize);
                    if host % 2 == 0 && host > 1 {
                        assert_eq!(routes.len() as u32, rings.min(host), "{host} × {hosts}");
                    }
                    let (mut pairs, mut exits) = (BTreeSet::new(), BTreeSet::new());
                    for route in &routes {
                        let order = visited(route, ranks);
                        for (at, &from) in order.iter().enumerate() {
                            let to = order[(at + 1) % order.len()];
                            assert!(pairs.insert((from, to)), "{routes:?}");
                            if from / host != to / host && host % 2 == 0 {
                                assert!(exits.insert(from), "{routes:?}");
                            }
                        }
                    }
                }
            }
        }
        let spread = RingSet::new(4).over_hosts(8).routes(16);
        let exits: BTreeSet<u32> = spread.iter().map(|route| route.rank(7) % 8 / 2).collect();
        assert_eq!(exits.len(), 4, "through four ports that two members share each");
    }

    #[test]
    fn orders_are_kept_by_number() {
        let orders = [vec![0, 2, 1, 3], vec![1, 0, 3, 2]];
        let set = RingSet::new(3).with_orders(&orders).unwrap();
        assert_eq!(set.orders(), orders);
        assert_eq!(set.to_string(), "3/4@0213,1032");
        assert_eq!(RingSet::parse("3/4@0213,1032"), Some(set));
        assert_eq!(RingSet::of_words(set.words()), Some(set));
        let routes = set.routes(8);
        assert_eq!(visited(&routes[0], 8)[..4], orders[0]);
        assert_eq!(visited(&routes[1], 8)[4..], [3, 1, 2, 0]);
        assert_eq!(visited(&routes[2], 8)[..4], orders[1]);
        assert!(set.is_apart(8));
        assert!(!set.is_apart(4), "the first ends with 3 to 0, over which the second goes");
        let last: Vec<u32> = (0..8).rev().collect();
        assert_eq!(
            RingSet::new(1).with_orders(std::slice::from_ref(&last)).unwrap().orders(),
            [last]
        );
        for bad in [
            "0",
            "257",
            "2/",
            "2/0",
            "2/4@",
            "2/4@0123,",
            "2/4@0012",
            "4/4@0123,0321",
            "2/3@0123",
            "2/9@012345678",
        ] {
            assert_eq!(RingSet::parse(bad), None, "{bad}");
        }
        assert_eq!(RingSet::of_words([2, 7, 0, 0, 0, 0]), None, "an order of no host");
    }
}
