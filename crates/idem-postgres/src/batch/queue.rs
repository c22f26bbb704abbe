//! Verbs that wait for a statement.

use idem_core::StoreError;
use tokio::sync::{mpsc, oneshot};

use crate::batch::verb::{Verb, VerbOutcome};

/// The most verbs in one statement: enough to share its costs, few enough that the first is not kept waiting by the last.
pub(crate) const MAX_BATCH: usize = 64;

/// How many verbs a worker chooses from: enough that those of either group fill a statement.
pub(crate) const QUEUE_CAPACITY: usize = 4 * MAX_BATCH;

/// A verb, and the channel for its answer.
pub(crate) struct Job {
    pub(crate) verb: Verb,
    pub(crate) answer: oneshot::Sender<Result<VerbOutcome, StoreError>>,
}

impl Job {
    pub(crate) fn reply(self, answer: Result<VerbOutcome, StoreError>) {
        // A caller that was cancelled will ask again.
        let _ = self.answer.send(answer);
    }
}

/// Verbs that no worker has taken yet.
pub(crate) struct Queue {
    arriving: mpsc::Receiver<Job>,
    /// Older than what is arriving.
    waiting: Vec<Job>,
    /// Whether the last call passed over the oldest.
    has_passed_over: bool,
}

impl Queue {
    pub(crate) fn new(arriving: mpsc::Receiver<Job>) -> Self {
        Self { arriving, waiting: Vec::with_capacity(QUEUE_CAPACITY), has_passed_over: false }
    }

    /// The verbs of the next statement, all of one group. Empty once all senders are dropped.
    ///
    /// Each function that a statement calls costs as much as several verbs, so acquires and settlements do not share one. The
    /// larger group goes first, because a few verbs would not fill a statement; the oldest is passed over once at most.
    ///
    /// Cancel-safe: what has arrived and is not returned stays here.
    pub(crate) async fn next(&mut self) -> Vec<Job> {
        if self.waiting.is_empty() {
            self.arriving.recv_many(&mut self.waiting, QUEUE_CAPACITY).await;
        }
        while self.waiting.len() < QUEUE_CAPACITY
            && let Ok(job) = self.arriving.try_recv()
        {
            self.waiting.push(job);
        }
        let Some(oldest) = self.waiting.first().map(|job| job.verb.group()) else { return Vec::new() };
        let of_its_group = self.waiting.iter().filter(|job| job.verb.group() == oldest).count();
        let others = self.waiting.len() - of_its_group;
        self.has_passed_over = !self.has_passed_over && of_its_group < others.min(MAX_BATCH);
        let group = if self.has_passed_over { oldest.other() } else { oldest };
        self.waiting.extract_if(.., |job| job.verb.group() == group).take(MAX_BATCH).collect()
    }
}

#[cfg(test)]
mod tests {
    use idem_core::RecordId;

    use super::*;
    use crate::batch::verb::VerbGroup;

    #[tokio::test]
    async fn the_larger_group_goes_first_and_the_oldest_is_passed_over_once_at_most() {
        let (sender, arriving) = mpsc::channel(QUEUE_CAPACITY);
        let mut queue = Queue::new(arriving);
        let arrive = |group, count| {
            for _ in 0..count {
                let id = RecordId::from_bytes([7; 32]);
                let verb = match group {
                    VerbGroup::Lookups => Verb::Lookup { id, lock: None, confirmed: false },
                    VerbGroup::Updates => Verb::Remove { id, version: 1 },
                };
                assert!(sender.try_send(Job { verb, answer: oneshot::channel().0 }).is_ok(), "there is room");
            }
        };
        let mut next = async || {
            let jobs = queue.next().await;
            let group = jobs.first().map(|job| job.verb.group());
            assert!(jobs.iter().all(|job| Some(job.verb.group()) == group), "one group");
            (group, jobs.len())
        };
        arrive(VerbGroup::Lookups, 1);
        arrive(VerbGroup::Updates, 1);
        assert_eq!(next().await, (Some(VerbGroup::Lookups), 1), "the oldest of as many");
        arrive(VerbGroup::Lookups, 2);
        arrive(VerbGroup::Updates, 1);
        assert_eq!(next().await, (Some(VerbGroup::Updates), 2), "as many again");
        arrive(VerbGroup::Updates, 3);
        assert_eq!(next().await, (Some(VerbGroup::Updates), 3), "more are waiting of it");
        arrive(VerbGroup::Updates, 5);
        assert_eq!(next().await, (Some(VerbGroup::Lookups), 2), "once at most");
        arrive(VerbGroup::Lookups, 6);
        assert_eq!(next().await, (Some(VerbGroup::Lookups), 6), "others were the oldest then");
        assert_eq!(next().await, (Some(VerbGroup::Updates), 5));
        arrive(VerbGroup::Lookups, MAX_BATCH);
        arrive(VerbGroup::Updates, MAX_BATCH + 1);
        assert_eq!(next().await, (Some(VerbGroup::Lookups), MAX_BATCH), "it fills a statement");
        assert_eq!(next().await, (Some(VerbGroup::Updates), MAX_BATCH));
        assert_eq!(next().await, (Some(VerbGroup::Updates), 1));
        drop(sender);
        assert_eq!(next().await, (None, 0), "nobody is left");
    }
}
