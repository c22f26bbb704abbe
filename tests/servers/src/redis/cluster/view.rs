//! The node list of a cluster node.

use std::ops::RangeInclusive;

use crate::Error;

/// The number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// A node of a cluster that has slots.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ClusterPrimary {
    /// Its port on 127.0.0.1.
    pub port: u16,
    /// Its slots, in ascending order.
    pub slots: Vec<RangeInclusive<u16>>,
}

impl ClusterPrimary {
    /// Whether it has the slot (0 to 16383).
    #[must_use]
    pub fn has(&self, slot: u16) -> bool {
        self.slots.iter().any(|range| range.contains(&slot))
    }
}

/// A line of `CLUSTER NODES`.
#[derive(Debug, PartialEq)]
pub(super) struct Member {
    pub(super) id: String,
    pub(super) port: u16,
    /// `myself`, `master`, `slave`, `fail?`, `fail`, `handshake`, …
    flags: Vec<String>,
    /// The id of a replica's primary.
    pub(super) primary: Option<String>,
    /// The newest configuration epoch of the node. If two nodes claim a slot, the newer one is right.
    pub(super) epoch: u64,
    pub(super) slots: Vec<RangeInclusive<u16>>,
}

impl Member {
    /// Parses `id ip:port@bus,name flags primary ping pong epoch link slot…`.
    fn parse(line: &str) -> Option<Member> {
        let mut words = line.split_ascii_whitespace();
        let (id, address, flags, primary) = (words.next()?, words.next()?, words.next()?, words.next()?);
        let (address, _) = address.split_once('@')?;
        let mut words = words.skip(2);
        let epoch = words.next()?.parse().ok()?;
        // A migrating slot is in brackets, after the slots that the node has.
        let slots = words.skip(1).filter(|word| !word.starts_with('['));
        Some(Member {
            id: id.into(),
            port: address.rsplit_once(':')?.1.parse().ok()?,
            flags: flags.split(',').map(str::to_owned).collect(),
            primary: (primary != "-").then(|| primary.into()),
            epoch,
            slots: slots.map(range).collect::<Option<_>>()?,
        })
    }

    pub(super) fn is(&self, flag: &str) -> bool {
        self.flags.iter().any(|own| own == flag)
    }

    /// Whether another node considers it failing, or does not know it well yet.
    pub(super) fn is_doubtful(&self) -> bool {
        ["fail?", "fail", "handshake", "noaddr"].iter().any(|flag| self.is(flag))
    }
}

/// Parses all lines of `CLUSTER NODES`.
pub(super) fn parse(printed: &str) -> Result<Vec<Member>, Error> {
    let member =
        |line| Member::parse(line).ok_or_else(|| Error::failed(format!("not a line of CLUSTER NODES: {line}")));
    printed.lines().map(member).collect()
}

fn range(word: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = word.split_once('-').unwrap_or((word, word));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_nodes_of_a_cluster_are_read() {
        let printed = "\
            07c37d 127.0.0.1:30004@40004,host slave e7d1ee 0 1426238317239 4 connected\n\
            e7d1ee 127.0.0.1:30001@40001 myself,master - 0 0 1 connected 0-5460 7000 [93->-292f8b] [77-<-e7d1eb]\n\
            292f8b :0@0 master,fail?,noaddr - 1426238316232 0 3 disconnected\n";
        let [replica, primary, lost] = &parse(printed).unwrap()[..] else { panic!("three lines") };
        assert_eq!((replica.port, replica.primary.as_deref(), replica.epoch), (30004, Some("e7d1ee"), 4));
        assert!(replica.is("slave") && replica.slots.is_empty() && !replica.is_doubtful());
        assert_eq!((primary.id.as_str(), primary.primary.as_deref()), ("e7d1ee", None));
        assert_eq!(primary.slots, [0..=5460, 7000..=7000]);
        assert!(primary.is("myself") && primary.is("master"));
        assert!(lost.is_doubtful());
    }

    #[test]
    fn a_line_of_something_else_is_refused() {
        for printed in
            ["ERR no\n", "id 127.0.0.1:1@2 master - 0 0 x connected\n", "id 127.0.0.1:1@2 master - 0 0 1 - y\n"]
        {
            assert!(parse(printed).is_err(), "{printed}");
        }
    }
}
