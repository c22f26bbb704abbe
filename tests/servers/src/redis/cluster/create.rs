//! Makes a cluster of nodes.

use super::view::SLOTS;
use super::{PRIMARIES, id_of};
use crate::Error;
use crate::redis::group::Group;
use crate::setup::expect;

/// Makes a cluster of nodes that do not know each other. The first nodes become primaries, and each of the others a replica of
/// one.
///
/// `redis-cli --cluster create` does the same with pauses between its steps.
pub(super) fn create(nodes: &Group) -> Result<(), Error> {
    // Epochs are distinct from the start, because nodes with the same epoch first have to settle which one is newer. A node
    // takes an epoch only while it knows no other node.
    for (node, epoch) in nodes.nodes().iter().zip(1..) {
        node.ask(&["CLUSTER", "SET-CONFIG-EPOCH", &u64::to_string(&epoch)])?;
    }
    for (index, node) in nodes.nodes().iter().enumerate() {
        for other in nodes.ports().into_iter().skip(index + 1) {
            node.ask(&["CLUSTER", "MEET", "127.0.0.1", &other.to_string()])?;
        }
    }
    let (primaries, replicas) = nodes.nodes().split_at(PRIMARIES);
    for (index, node) in primaries.iter().enumerate() {
        let slots: Vec<String> = (0..SLOTS).filter(|slot| share(*slot) == index).map(|slot| slot.to_string()).collect();
        let words = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str));
        node.ask(&words.collect::<Vec<_>>())?;
    }
    // A node can only follow a node that it knows.
    nodes.wait_until_sound(|| {
        nodes.nodes().iter().try_for_each(|node| {
            let known = super::members(node)?;
            expect("the number of nodes that know each other", known.len(), nodes.nodes().len())?;
            expect(
                "the number of nodes in a handshake",
                known.iter().filter(|member| member.is("handshake")).count(),
                0,
            )
        })
    })?;
    for (replica, primary) in replicas.iter().zip(primaries) {
        replica.ask(&["CLUSTER", "REPLICATE", &id_of(primary)?])?;
    }
    Ok(())
}

/// The index of the primary that gets a slot. Primaries get equal, contiguous shares.
fn share(slot: u16) -> usize {
    usize::from(slot) * PRIMARIES / usize::from(SLOTS)
}

#[cfg(test)]
mod tests {
    use super::{SLOTS, share};

    #[test]
    fn shares_are_equal_and_in_one_piece() {
        let shares: Vec<usize> = (0..SLOTS).map(share).collect();
        assert!(shares.is_sorted());
        let sizes = [0, 1, 2].map(|index| shares.iter().filter(|share| **share == index).count());
        assert_eq!(sizes, [5462, 5461, 5461]);
    }
}
