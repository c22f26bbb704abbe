//! Checks that everything acknowledged is still there, and reports what a run showed.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use idem_core::{IdempotencyStore, OwnerToken, RecordId, StoreError};
use idem_redis::RedisStore;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::ENOUGH_FACTS;
use super::key::{Breach, Key};
use super::request::{TERM, request};
use super::world::{Told, Trouble, World, by_kind};
use crate::Error;
use crate::report::{Report, rounded};

/// How many keys are examined at once.
const AT_ONCE: usize = 64;

/// How often an examination retries after an error.
const TRIES: u64 = 10;

/// How many offending keys or errors are printed.
const SHOWN: usize = 5;

/// What the test knows about the failover that it made.
pub(super) struct Round {
    /// For the output: which server was replaced by which, and how.
    pub(super) story: String,
    /// The facts acknowledged in the second before the primary was cut off.
    pub(super) facts_before: u64,
    /// The time from the end of the old primary until there was a new one.
    pub(super) took: Duration,
    /// When errors may come; `None` if at any time.
    pub(super) errors_allowed: Option<(Instant, Instant)>,
    /// How many acknowledgements came while no replica could have the data.
    pub(super) told_alone: u64,
}

/// All rounds of a run.
#[derive(Debug, Default)]
pub(super) struct Judge {
    rounds: u64,
    keys: BTreeMap<RecordId, Key>,
    facts: u64,
    breaches: BTreeMap<Breach, u64>,
    shown: Vec<String>,
    errors: BTreeMap<String, u64>,
    unexpected: BTreeMap<String, u64>,
    outages: Vec<f64>,
    too_few_facts: Vec<String>,
    told_alone: u64,
}

impl Judge {
    /// Examines everything that the round has acknowledged.
    pub(super) async fn round(
        &mut self,
        store: &RedisStore,
        world: &World,
        mut keys: BTreeMap<RecordId, Key>,
        round: Round,
    ) -> Result<(), Error> {
        self.rounds += 1;
        let Told { longest_outage, troubles, intruded, denied } = world.told();
        for id in intruded {
            keys.get_mut(&id).into_iter().for_each(Key::intruded);
        }
        let mut keys = examine(store, keys).await?;
        // Keys whose lease was denied although it still exists.
        for id in denied {
            keys.get_mut(&id).into_iter().for_each(Key::denied);
        }
        let breaches = self.count(&keys);
        let (number, facts) = (self.rounds, round.facts_before);
        self.facts += world.facts();
        self.told_alone += round.told_alone;
        self.outages.push(longest_outage.as_secs_f64());
        println!(
            "{number:>5} {:>21} {:>5.1} s {:>7} {facts:>7} {:>8.1} s {:>7}   {}",
            round.story,
            round.took.as_secs_f64(),
            keys.len(),
            longest_outage.as_secs_f64(),
            troubles.len(),
            told(&breaches),
        );
        if facts < ENOUGH_FACTS {
            self.too_few_facts.push(format!("{facts} in round {number}"));
        }
        by_kind(&troubles, &mut self.errors);
        if let Some((from, until)) = round.errors_allowed {
            let outside: Vec<Trouble> =
                troubles.into_iter().filter(|trouble| trouble.at < from || trouble.at > until).collect();
            for trouble in outside.iter().take(SHOWN) {
                let after = trouble.at.saturating_duration_since(until);
                let before = from.saturating_duration_since(trouble.at);
                println!("      {before:?} before or {after:?} after errors may come: {}", trouble.said);
            }
            by_kind(&outside, &mut self.unexpected);
        }
        // A loss is counted once.
        self.keys.extend(keys.into_iter().filter(|(_, key)| key.breach().is_none()));
        Ok(())
    }

    /// Prints the header of the lines of rounds.
    pub(super) fn header() {
        println!("round                replaced    after    keys facts/s   no answer  errors   breaches");
    }

    fn count(&mut self, keys: &BTreeMap<RecordId, Key>) -> BTreeMap<Breach, u64> {
        let mut breaches = BTreeMap::new();
        for key in keys.values() {
            let Some(breach) = key.breach() else { continue };
            *breaches.entry(breach).or_default() += 1;
            *self.breaches.entry(breach).or_default() += 1;
            if self.shown.len() < SHOWN {
                self.shown.push(format!("{breach:?} of {} in round {}", key.id, self.rounds));
            }
        }
        breaches
    }

    /// Examines once more everything that survived its round, and reports.
    pub(super) async fn finish(
        mut self,
        store: &RedisStore,
        report: &mut Report,
        min_replicas: u32,
    ) -> Result<(), Error> {
        let keys = examine(store, std::mem::take(&mut self.keys)).await?;
        let later = self.count(&keys);
        let of = |breach| self.breaches.get(&breach).copied().unwrap_or_default();
        let lost = of(Breach::LeaseLost) + of(Breach::SettlementLost);
        report.fact("rounds", self.rounds);
        report.fact("keys_still_held_or_replayed", keys.len() as u64 - later.values().sum::<u64>());
        report.fact("facts_acknowledged", self.facts);
        report.fact(
            "acknowledged_records_lost",
            json!({"leases": of(Breach::LeaseLost), "settlements": of(Breach::SettlementLost),
                "found_only_after_later_rounds": later.values().sum::<u64>()}),
        );
        report.fact("second_owners", of(Breach::SecondOwner));
        report.fact("leases_denied_to_their_owners", of(Breach::LeaseDenied));
        report.fact("probes_answered_while_no_replica_listened", self.told_alone);
        report.fact("other_answers", of(Breach::OtherAnswer));
        let longest = self.outages.iter().copied().fold(0.0, f64::max);
        report.fact("longest_time_without_an_answer_seconds", rounded(longest, 2));
        report.note(
            "times_without_an_answer_seconds",
            json!(self.outages.iter().map(|s| rounded(*s, 2)).collect::<Vec<_>>()),
        );
        report.fact("errors", json!(self.errors));
        report.expect(of(Breach::OtherAnswer) == 0, format!("an answer was not that of its owner: {:?}", self.shown));
        let few = &self.too_few_facts;
        report.expect(few.is_empty(), format!("fewer than {ENOUGH_FACTS} facts in the second before: {few:?}"));
        let unexpected = &self.unexpected;
        report.expect(unexpected.is_empty(), format!("errors outside of failovers: {unexpected:?}"));
        if min_replicas == 0 {
            println!("  this is the window of asynchronous replication: any number of losses is as documented");
            return Ok(());
        }
        let broken = lost + of(Breach::SecondOwner);
        report.expect(
            broken == 0,
            format!("{broken} acknowledged records were lost or had two owners: {:?}", self.shown),
        );
        let denied = of(Breach::LeaseDenied);
        report.expect(denied == 0, format!("{denied} owners were told that their lease is lost, and it is not"));
        let told = self.told_alone;
        report.expect(told == 0, format!("{told} answers said what no replica could have"));
        let alone = self.errors.keys().any(|said| said.contains("replicas have it"));
        report.expect(alone, "no verb ever lacked replicas, so no primary was cut off while it had clients");
        Ok(())
    }
}

/// Formats breaches as in `3 SettlementLost, 1 SecondOwner`.
fn told(breaches: &BTreeMap<Breach, u64>) -> String {
    let told: Vec<String> = breaches.iter().map(|(breach, count)| format!("{count} {breach:?}")).collect();
    if told.is_empty() { "none".into() } else { told.join(", ") }
}

/// Examines every key that has no breach yet.
async fn examine(store: &RedisStore, keys: BTreeMap<RecordId, Key>) -> Result<BTreeMap<RecordId, Key>, Error> {
    let looks = keys.into_values().map(|key| look(store, key));
    let examined = futures_util::stream::iter(looks).buffer_unordered(AT_ONCE);
    examined.map_ok(|key| (key.id, key)).try_collect().await
}

/// Asks for a key as its owner, if that has not settled it, and as another client.
async fn look(store: &RedisStore, mut key: Key) -> Result<Key, Error> {
    if key.breach().is_some() {
        return Ok(key);
    }
    if let Some(lease) = key.lease().filter(|_| key.is_running()).cloned() {
        let outcome = persist(|| store.renew(&lease, TERM)).await?;
        key.renewed(outcome);
    }
    let asked = request(key.id, OwnerToken::random());
    let outcome = persist(|| store.acquire(&asked)).await?;
    key.examined(outcome);
    Ok(key)
}

/// Repeats a verb until it is answered, or `TRIES` times.
pub(super) async fn persist<T, F>(verb: impl Fn() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut tries = 0;
    loop {
        match verb().await {
            Err(error) if error.is_retryable() && tries < TRIES => tries += 1,
            answer => return Ok(answer?),
        }
        sleep(Duration::from_millis(200)).await;
    }
}
