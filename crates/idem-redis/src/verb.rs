//! A verb on one record. The state machine decides; Redis commands read and replace the record.

use std::sync::atomic::{AtomicBool, Ordering};

use idem_core::{
    Acquire, AcquireOutcome, Erase, EraseOutcome, Lease, OwnerAction, OwnerOutcome, Record, RecordId, Resolve,
    ResolveOutcome, State, StoreError, StoreErrorKind, TimeOffset, Timestamp, machine,
};
use redis::{Cmd, Value};
use tokio::time::Instant;

use crate::durability::DurabilityReport;
use crate::error::{Failure, Phase};
use crate::keys::Keys;
use crate::packed::{Ending, Fresh, Next, Stored};
use crate::reply;
use crate::script::{Arg, Exchange, Question, Scripts};
use crate::seen::{Found, Seen};
use crate::subscription::Subscription;
use crate::transport::{Reply, Transport};

/// What the clones of a store share, and its verbs use.
pub(crate) struct Shared {
    pub(crate) scripts: Scripts,
    pub(crate) keys: Keys,
    /// How many replicas are awaited, and for how many milliseconds.
    pub(crate) replicas: Option<(u32, u64)>,
    pub(crate) allow_eviction: bool,
    pub(crate) durability: DurabilityReport,
    pub(crate) offset: TimeOffset,
    pub(crate) subscription: Subscription,
}

/// A verb on one record, which takes one exchange or more.
pub(crate) struct Verb<'a> {
    shared: &'a Shared,
    transport: &'a Transport,
    /// What it does, for errors.
    what: &'a str,
    key: String,
    /// How many replicas are awaited, and for how many milliseconds.
    replicas: Option<(u32, u64)>,
    /// The deadline of all its exchanges together.
    deadline: Instant,
    /// Whether an exchange may have changed the record although its answer was lost.
    may_have_changed: AtomicBool,
}

impl<'a> Verb<'a> {
    /// A verb whose deadline counts from now.
    pub(crate) fn new(
        shared: &'a Shared,
        transport: &'a Transport,
        what: &'a str,
        id: &RecordId,
        replicas: Option<(u32, u64)>,
    ) -> Self {
        Self {
            shared,
            transport,
            what,
            key: shared.keys.of(id),
            replicas,
            deadline: transport.deadline(),
            may_have_changed: AtomicBool::new(false),
        }
    }

    async fn ask(&self, question: Question<'_>, replicas: Option<(u32, u64)>) -> Result<Reply, Failure> {
        let exchange = Exchange { key: self.key.as_bytes(), question, replicas };
        let answer = self.transport.run(&exchange, self.deadline).await;
        let may_have_changed = match &answer {
            Ok(reply) => reply.is_repeated,
            Err(failure) => failure.may_have_run(),
        };
        self.may_have_changed.fetch_or(may_have_changed, Ordering::Relaxed);
        answer
    }

    fn offset(&self) -> i64 {
        self.shared.offset.micros()
    }

    fn failed(&self, failure: Failure) -> StoreError {
        self.after_all(failure.of(self.what, Phase::Serving))
    }

    /// The verb's error for that of one exchange: indeterminate if an earlier exchange may have changed the record.
    fn after_all(&self, error: StoreError) -> StoreError {
        if self.may_have_changed.load(Ordering::Relaxed) { error.indeterminate() } else { error }
    }

    fn seen(&self, reply: Reply, new: Option<&Fresh>) -> Result<Option<Seen>, StoreError> {
        Seen::read(reply.values, new, reply.too_few, self.offset()).map_err(|error| self.after_all(error))
    }

    /// Reads the record; `None` when it has to be read again.
    pub(crate) async fn look(&self) -> Result<Option<Seen>, StoreError> {
        let reply = self.ask_for_look(None, self.replicas).await.map_err(|failure| self.failed(failure))?;
        self.seen(reply, None)
    }

    /// Reads the record without a write, for a server that refuses writes. No replica is then known to have the record.
    async fn look_only(&self) -> Result<Option<Seen>, StoreError> {
        let reply = self.ask_for_look(None, None).await.map_err(|failure| self.failed(failure))?;
        self.seen(Reply { too_few: self.replicas.map(|_| 0), ..reply }, None)
    }

    /// Reads the record, and writes `new` if there is none; `None` when it has to be read again.
    async fn begin(&self, new: &Fresh) -> Result<Option<Seen>, StoreError> {
        // A caller that awaits replicas has to write even when it only finds a record. In a Cluster, a server that is importing
        // a slot requires `ASKING` before each command, and the driver sends it only before the first.
        let by_script = self.replicas.is_some() || self.transport.is_cluster();
        let begun = if by_script { self.ask_for_look(Some(new), self.replicas).await } else { self.set(new).await };
        match begun {
            Ok(reply) => self.seen(reply, Some(new)),
            // An existing record can be answered without a write.
            Err(failure) if failure.is_refused_write() => match self.look_only().await? {
                Some(Seen { found: Found::Nothing, .. }) => Err(self.failed(failure)),
                seen => Ok(seen),
            },
            Err(failure) => Err(self.failed(failure)),
        }
    }

    async fn ask_for_look(&self, new: Option<&Fresh>, replicas: Option<(u32, u64)>) -> Result<Reply, Failure> {
        let (bytes, life_ms) = new.map_or((&[][..], 0), |new| (&new.bytes, new.life_ms));
        let args = [Arg::from(replicas.is_some()), Arg::Bytes(bytes), Arg::Number(life_ms)];
        let mut reply = self.ask(Question::Script(&self.shared.scripts.look, &args), replicas).await?;
        if let Some(Value::Array(values)) = reply.values.pop() {
            reply.values = values;
        }
        Ok(reply)
    }

    /// Begins with native commands, which cost the server a third of a script's time. Other clients may change the record
    /// between two of them, so `replace` compares before it writes.
    async fn set(&self, new: &Fresh) -> Result<Reply, Failure> {
        let mut set = Cmd::with_capacity(7, 40 + self.key.len() + new.bytes.len());
        set.arg("SET").arg(&self.key).arg(&new.bytes).arg("NX").arg("GET").arg("PX").arg(new.life_ms);
        let mut expires = Cmd::with_capacity(2, 11 + self.key.len());
        expires.arg("PEXPIRETIME").arg(&self.key);
        self.ask(Question::Commands { all: &[redis::cmd("TIME"), set, expires], writing: 1 }, None).await
    }

    /// Replaces or removes a record that has not changed since it was read; `None` when it has.
    async fn replace(
        &self,
        seen: &Stored,
        next: Option<&Next>,
        channel: &[u8],
        replicas: Option<(u32, u64)>,
    ) -> Result<Option<Reply>, StoreError> {
        let (bytes, expires_ms) = next.map_or((&[][..], 0), |next| (&next.bytes, next.expires_ms));
        let args = [
            Arg::Bytes(seen.head()),
            Arg::Number(seen.expires_ms),
            Arg::Bytes(bytes),
            Arg::Number(expires_ms),
            Arg::Bytes(channel),
        ];
        let replacing = self.ask(Question::Script(&self.shared.scripts.replace, &args), replicas);
        self.changed(replacing.await)
    }

    /// The reply of a script that writes conditionally; `None` when it wrote nothing.
    fn changed(&self, answer: Result<Reply, Failure>) -> Result<Option<Reply>, StoreError> {
        let reply = answer.map_err(|failure| self.failed(failure))?;
        let is_changed = reply::is_changed(&reply.values).map_err(|error| self.after_all(error))?;
        Ok(is_changed.then_some(reply))
    }

    /// Replaces the record by what the state machine decided; `None` when it has changed since it was read.
    async fn put(&self, seen: &Stored, next: Option<Record>, channel: &[u8]) -> Result<Option<Reply>, StoreError> {
        let next = next.map(|next| {
            // Callers that wait for this run keep waiting for it.
            let is_same_run = matches!(next.state, State::InProgress { .. }) && next.owner == seen.record.owner;
            Next::new(&next, seen.is_awaited() && is_same_run, seen.next_change(), self.offset())
        });
        self.replace(seen, next.as_ref(), channel, self.replicas).await
    }

    /// Marks the record as awaited, so that its settlement is published; `false` when the record has changed.
    ///
    /// The mark is a hint: waiters also poll, so an error is ignored.
    async fn note_waiting(&self, seen: &Seen) -> bool {
        match &seen.found {
            Found::Record(stored) if !stored.is_awaited() => {
                let noting = self.replace(stored, Some(&stored.awaited()), b"", None).await;
                !matches!(noting, Ok(None))
            }
            _ => true,
        }
    }

    pub(crate) async fn acquire(&self, request: &Acquire) -> Result<(AcquireOutcome, Option<i64>), StoreError> {
        // The lifetime of a new record does not depend on the time.
        let (new, _) = machine::acquire(None, request, Timestamp::from_unix_micros(0));
        let new = new.as_ref().map(Fresh::new);
        loop {
            let seen = match &new {
                Some(new) => self.begin(new).await?,
                None => self.look().await?,
            };
            let Some(seen) = seen else { continue };
            let (next, outcome) = machine::acquire(seen.record(), request, seen.now);
            match &seen.found {
                Found::Record(stored) if next.as_ref() != seen.record() => {
                    if let Some(reply) = self.put(stored, next, b"").await? {
                        return Ok((outcome, reply.too_few));
                    }
                }
                _ => {
                    let may_wait = matches!(outcome, AcquireOutcome::InProgress { .. });
                    if !may_wait || self.note_waiting(&seen).await {
                        return Ok((outcome, seen.too_few));
                    }
                }
            }
        }
    }

    pub(crate) async fn own(&self, lease: &Lease, action: OwnerAction<'_>) -> Result<OwnerOutcome, StoreError> {
        loop {
            let Some(seen) = self.look().await? else { continue };
            let (next, outcome) = machine::apply(seen.record(), lease.owner, action, seen.now);
            match &seen.found {
                Found::Record(stored) if next.as_ref() != seen.record() => {
                    let is_end = matches!(action, OwnerAction::Settle(..)) && stored.is_awaited();
                    let channel = if is_end { self.shared.subscription.channel() } else { b"" };
                    if let Some(reply) = self.put(stored, next, channel).await? {
                        return self.unless_too_few(outcome, reply.too_few);
                    }
                }
                _ => return self.unless_too_few(outcome, seen.too_few),
            }
        }
    }

    /// Resolves an operation. It awaits replicas as an acquire does.
    pub(crate) async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        loop {
            let Some(seen) = self.look().await? else { continue };
            let (next, outcome) = machine::resolve(seen.record(), request, seen.now);
            match &seen.found {
                Found::Record(stored) if next.as_ref() != seen.record() => {
                    let channel = if stored.is_awaited() { self.shared.subscription.channel() } else { b"" };
                    if let Some(reply) = self.put(stored, next, channel).await? {
                        return self.unless_too_few(outcome, reply.too_few);
                    }
                }
                _ => return self.unless_too_few(outcome, seen.too_few),
            }
        }
    }

    /// Erases a record. It awaits replicas as an acquire does. Waiters are not told: the record was settled before.
    pub(crate) async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        loop {
            let Some(seen) = self.look().await? else { continue };
            let (next, outcome) = machine::erase(seen.record(), request, seen.now);
            match &seen.found {
                Found::Record(stored) if next.as_ref() != seen.record() => {
                    if let Some(reply) = self.put(stored, next, b"").await? {
                        return self.unless_too_few(outcome, reply.too_few);
                    }
                }
                _ => return self.unless_too_few(outcome, seen.too_few),
            }
        }
    }

    /// Settles in one exchange; `None` when the record has to be read first.
    pub(crate) async fn end(&self, ending: &Ending) -> Result<Option<OwnerOutcome>, StoreError> {
        let (before, after) = ending.around();
        let args = [
            Arg::Bytes(ending.owned()),
            Arg::Bytes(before),
            Arg::Bytes(after),
            Arg::Number(ending.life_ms),
            Arg::Bytes(self.shared.subscription.channel()),
            Arg::Number(self.offset()),
        ];
        // Only tests move the time, and each argument costs the server time.
        let args = if self.offset() == 0 { &args[..5] } else { &args[..] };
        let ending = self.ask(Question::Script(&self.shared.scripts.settle, args), self.replicas).await;
        let reply = self.changed(ending)?;
        reply.map(|reply| self.unless_too_few(OwnerOutcome::Applied, reply.too_few)).transpose()
    }

    pub(crate) fn too_few(&self, found: i64) -> StoreError {
        let (asked_for, what) = (self.shared.replicas.map_or(0, |(asked_for, _)| asked_for), self.what);
        let message = format!("could not {what}: {found} of {asked_for} replicas have it, so a failover could lose it");
        StoreError::new(StoreErrorKind::Unavailable, message).indeterminate()
    }

    /// Turns the outcome into an error if too few replicas acknowledged it. That includes `LeaseLost`: a replaced primary
    /// does not know the leases that its successor granted.
    fn unless_too_few<T>(&self, outcome: T, too_few: Option<i64>) -> Result<T, StoreError> {
        too_few.map_or(Ok(outcome), |found| Err(self.too_few(found)))
    }
}
