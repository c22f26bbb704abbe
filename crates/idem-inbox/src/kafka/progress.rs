//! How far the messages of each partition are.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdkafka::consumer::{BaseConsumer, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaResult, RDKafkaErrorCode};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use tokio::sync::Notify;

/// How far the messages of a partition that are received may be ahead of the committed offset. So after a crash, the first ones that
/// are delivered contain all that ran.
const WINDOW: i64 = 256;

/// What is known of the partitions that a consumer has. The client reports revocations and commits to it.
#[derive(Default)]
pub(super) struct Group {
    partitions: Mutex<HashMap<(String, i32), Arc<Partition>>>,
    /// Partitions with a message whose task has failed: its offset would never be passed.
    to_repeat: Mutex<Vec<Arc<Partition>>>,
    /// An offset was committed, a message failed, or partitions were revoked.
    pub(super) has_changed: Notify,
}

/// A partition, from its assignment to its revocation.
pub(super) struct Partition {
    pub(super) topic: String,
    pub(super) number: i32,
    /// The offset of the first message of this assignment.
    first: i64,
    progress: Mutex<Progress>,
}

/// The offsets of an assignment.
struct Progress {
    /// Messages that the caller has received, and that have not ended.
    open: BTreeSet<i64>,
    /// The offset after the last one of those that the caller has received.
    next: i64,
    /// The offset that is to be committed next.
    stored: i64,
    committed: i64,
    is_revoked: bool,
}

impl Group {
    /// The partition of a message that was just fetched; `None` if an assignment begins with it. `expected` is the least offset that
    /// may follow the messages that wait.
    ///
    /// Offsets go back if the cluster has lost messages. That ends the assignment.
    pub(super) fn partition(&self, topic: &str, number: i32, offset: i64, expected: i64) -> Option<Arc<Partition>> {
        let place = (topic.to_owned(), number);
        let known = self.partitions().get(&place).map(Arc::clone)?;
        if offset < known.progress().next.max(expected) {
            self.revoke([place]);
            return None;
        }
        Some(known)
    }

    /// Begins an assignment of a partition with its first message.
    pub(super) fn begin(&self, topic: &str, number: i32, first: i64) -> Arc<Partition> {
        let progress = Mutex::new(Progress::beginning_with(first));
        let partition = Arc::new(Partition { topic: topic.to_owned(), number, first, progress });
        self.partitions().insert((topic.to_owned(), number), Arc::clone(&partition));
        partition
    }

    /// Ends assignments. Their messages can be acknowledged no more.
    pub(super) fn revoke(&self, places: impl IntoIterator<Item = (String, i32)>) {
        for place in places {
            let revoked = self.partitions().remove(&place);
            if let Some(partition) = revoked {
                partition.progress().is_revoked = true;
            }
        }
        self.has_changed.notify_one();
    }

    /// Notes that the messages of a partition have to be received again.
    pub(super) fn repeat(&self, partition: Arc<Partition>) {
        lock(&self.to_repeat).push(partition);
        self.has_changed.notify_one();
    }

    /// Takes the partitions that were noted.
    pub(super) fn take_to_repeat(&self) -> Vec<Arc<Partition>> {
        std::mem::take(&mut *lock(&self.to_repeat))
    }

    fn partitions(&self) -> MutexGuard<'_, HashMap<(String, i32), Arc<Partition>>> {
        lock(&self.partitions)
    }
}

impl ClientContext for Group {}

impl ConsumerContext for Group {
    fn pre_rebalance(&self, _consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(_) => {}
            Rebalance::Revoke(list) => {
                self.revoke(list.elements().into_iter().map(|one| (one.topic().to_owned(), one.partition())));
            }
            Rebalance::Error(_) => {
                let all: Vec<_> = self.partitions().keys().cloned().collect();
                self.revoke(all);
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        if let Err(error) = result
            && error.rdkafka_error_code() != Some(RDKafkaErrorCode::NoOffset)
        {
            tracing::warn!(error = &error as &dyn std::error::Error, "an offset was not committed; it is tried again");
        }
        let partitions = self.partitions();
        for committed in offsets.elements() {
            let partition = partitions.get(&(committed.topic().to_owned(), committed.partition()));
            if let (Some(partition), Ok(()), Offset::Offset(offset)) =
                (partition, committed.error(), committed.offset())
            {
                partition.progress().commit(offset);
            }
        }
        drop(partitions);
        self.has_changed.notify_one();
    }
}

impl Partition {
    /// Whether a message may have killed its process, as it is one of the first of its assignment.
    pub(super) fn is_suspect(&self, offset: i64) -> bool {
        offset < self.first + WINDOW
    }

    /// Notes that the caller receives this message. False if it has to wait for a commit.
    pub(super) fn open(&self, offset: i64) -> bool {
        self.progress().open(offset)
    }

    /// Notes that this message has ended. Calls `store` with the offset that is to be committed, if it is another one. False if the
    /// partition was revoked.
    pub(super) fn end<E>(&self, offset: i64, store: impl FnOnce(i64) -> Result<(), E>) -> Result<bool, E> {
        // Locked until it is stored, so that the stored offset does not go back.
        let mut progress = self.progress();
        if progress.is_revoked {
            return Ok(false);
        }
        if let Some(ended) = progress.end(offset) {
            store(ended)?;
            progress.stored = ended;
        }
        Ok(true)
    }

    /// The offset of the first message that has not ended; `None` if the partition was revoked.
    pub(super) fn first_open(&self) -> Option<i64> {
        let progress = self.progress();
        (!progress.is_revoked).then_some(progress.stored)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }
}

impl Progress {
    fn beginning_with(first: i64) -> Self {
        Self { open: BTreeSet::new(), next: first, stored: first, committed: first, is_revoked: false }
    }

    fn open(&mut self, offset: i64) -> bool {
        if self.open.is_empty() && self.committed >= self.next {
            // Nothing lies between: a consumer that begins at the committed offset gets this message first.
            self.committed = self.committed.max(offset);
        }
        let may_open = offset < self.committed + WINDOW;
        if may_open {
            self.open.insert(offset);
            self.next = offset + 1;
        }
        may_open
    }

    /// The offset that is to be committed, if it is beyond the last one.
    fn end(&mut self, offset: i64) -> Option<i64> {
        self.open.remove(&offset);
        let ended = self.open.first().copied().unwrap_or(self.next);
        (ended > self.stored).then_some(ended)
    }

    /// An offset was committed. Beyond what was stored, it is of an earlier assignment.
    fn commit(&mut self, offset: i64) {
        if offset <= self.stored {
            self.committed = self.committed.max(offset);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// Ends a message, and returns the offset that was stored.
    fn end(partition: &Partition, offset: i64) -> Option<i64> {
        let mut stored = None;
        let store = |offset| {
            stored = Some(offset);
            Ok::<_, Infallible>(())
        };
        assert_eq!(partition.end(offset, store), Ok(true));
        stored
    }

    #[test]
    fn no_offset_is_committed_before_its_message_has_ended() {
        let partition = Group::default().begin("t", 0, 5);
        assert!((5..8).all(|offset| partition.open(offset)));
        assert_eq!(end(&partition, 6), None);
        assert_eq!(end(&partition, 5), Some(7));
        assert_eq!(end(&partition, 5), None, "again");
        assert_eq!(partition.first_open(), Some(7));
        assert_eq!(end(&partition, 7), Some(8));
    }

    #[test]
    fn a_window_is_open_beyond_the_committed_offset() {
        let group = Group::default();
        let partition = group.begin("t", 0, 0);
        assert!((0..WINDOW).all(|offset| partition.open(offset) && partition.is_suspect(offset)));
        assert!(!partition.open(WINDOW) && !partition.is_suspect(WINDOW));
        assert_eq!(end(&partition, 0), Some(1));
        assert!(!partition.open(WINDOW), "it is not committed yet");
        partition.progress().commit(2);
        assert!(!partition.open(WINDOW), "that is of an earlier assignment");
        partition.progress().commit(1);
        assert!(partition.open(WINDOW) && !partition.open(WINDOW + 1));
    }

    #[test]
    fn a_gap_is_passed_when_all_before_it_is_committed() {
        let partition = Group::default().begin("t", 0, 0);
        assert!(partition.open(0));
        let behind_a_gap = 10 * WINDOW;
        assert!(!partition.open(behind_a_gap), "0 has not ended");
        assert_eq!(end(&partition, 0), Some(1));
        assert!(!partition.open(behind_a_gap), "0 is not committed");
        partition.progress().commit(1);
        assert!(partition.open(behind_a_gap));
        assert_eq!(end(&partition, behind_a_gap), Some(behind_a_gap + 1));
    }

    #[test]
    fn offsets_that_go_back_begin_a_new_assignment() {
        let group = Group::default();
        let before = group.begin("t", 0, 5);
        assert!(before.open(5) && before.open(6));
        assert!(group.partition("t", 0, 7, i64::MIN).is_some_and(|known| Arc::ptr_eq(&known, &before)));
        assert!(group.partition("t", 0, 8, 8).is_some(), "7 waits");
        assert!(group.partition("t", 1, 0, i64::MIN).is_none(), "another partition");
        assert!(group.partition("t", 0, 6, i64::MIN).is_none());
        assert_eq!(before.end(5, |_| Ok::<_, Infallible>(())), Ok(false), "it can be acknowledged no more");
        assert_eq!(before.first_open(), None);
        group.begin("t", 0, 6);
        assert!(group.partition("t", 0, 7, 8).is_none(), "7 waits already");
    }

    #[test]
    fn what_could_not_be_stored_is_stored_with_the_next_end() {
        let partition = Group::default().begin("t", 0, 0);
        assert!(partition.open(0) && partition.open(1));
        assert_eq!(partition.end(0, |_| Err("away")), Err("away"));
        assert_eq!(partition.first_open(), Some(0));
        assert_eq!(end(&partition, 1), Some(2));
    }
}
