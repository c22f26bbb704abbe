//! Checks that everything acknowledged is still there, and reports what a run showed.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use idem_core::{AcquireOutcome, IdempotencyStore, OwnerOutcome, OwnerToken, TransactionalStore};
use idem_postgres::PostgresStore;
use serde_json::json;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use super::load::{Ran, TRANSACTIONAL, judge, outcome_of, request, transact};
use super::operation::{Contract, Found, Operation, Verdict, What};
use super::wal::Cut;
use crate::Error;
use crate::failover::judge::persist;
use crate::failover::request::TERM;
use crate::failover::world::{Told, World, by_kind};
use crate::report::{Report, rounded};

/// How many operations are examined at once.
const AT_ONCE: usize = 64;

/// The least number of acknowledged records in a run.
const ENOUGH_RECORDS: u64 = 1_000;

/// What the test knows about the failover that it made.
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) story: &'static str,
    /// The facts acknowledged in the second before the standby was cut off.
    pub(super) facts_before: u64,
    /// The time from the end of the old primary until clients found the new one.
    pub(super) took: Duration,
    /// Sessions that waited for the standby and were terminated.
    pub(super) terminated: i64,
    pub(super) cut: Cut,
}

/// Counts of facts and operations by outcome.
#[derive(Debug, Default, Clone)]
struct Counts {
    records: u64,
    facts: u64,
    lost: BTreeMap<What, u64>,
    lost_too_early: u64,
    kept_too_late: u64,
    /// Facts that the old primary acknowledged after its standby received nothing any more.
    told_alone: u64,
    second_owners: u64,
    ran_again: u64,
    other_answers: u64,
}

impl Counts {
    fn lost(&self) -> u64 {
        self.lost.values().sum()
    }

    fn add(&mut self, other: &Counts) {
        self.records += other.records;
        self.facts += other.facts;
        for (what, count) in &other.lost {
            *self.lost.entry(*what).or_default() += count;
        }
        self.lost_too_early += other.lost_too_early;
        self.kept_too_late += other.kept_too_late;
        self.told_alone += other.told_alone;
        self.second_owners += other.second_owners;
        self.ran_again += other.ran_again;
        self.other_answers += other.other_answers;
    }

    fn count(&mut self, operation: &Operation, found: &Found, cut: &Cut) {
        self.records += 1;
        for (what, fact, has_lasted) in operation.facts(found) {
            self.facts += 1;
            *self.lost.entry(what).or_default() += u64::from(!has_lasted);
            self.told_alone += u64::from(cut.is_alone(fact));
            match cut.judge(fact, has_lasted) {
                Verdict::AsItMust => {}
                Verdict::LostTooEarly => self.lost_too_early += 1,
                Verdict::KeptTooLate => self.kept_too_late += 1,
            }
        }
        let again = u64::from(operation.has_second_owner);
        match operation.contract {
            Contract::AtMostOnce => self.second_owners += again,
            Contract::Transactional => self.ran_again += again,
        }
        self.other_answers += u64::from(operation.has_other_answer || *found == Found::OtherAnswer);
    }
}

/// Business writes and records that do not agree.
#[derive(Debug, Default, Clone, Copy)]
struct Torn {
    rows_without_record: i64,
    records_without_row: i64,
    several_rows: i64,
    other_rows: i64,
}

impl Torn {
    /// Compares all operations under Transactional, acknowledged or not.
    async fn look(connection: &mut PgConnection) -> Result<Self, Error> {
        let sql = format!(
            "SELECT count(*) FILTER (WHERE record.id IS NULL), count(*) FILTER (WHERE written.id IS NULL),
                count(*) FILTER (WHERE written.rows > 1), count(*) FILTER (WHERE written.answer <> record.body)
            FROM (SELECT id, count(*) AS rows, (array_agg(answer))[1] AS answer FROM business GROUP BY id) AS written
            FULL JOIN (SELECT id, body FROM idem.idem_records WHERE operation = '{TRANSACTIONAL}') AS record USING (id)"
        );
        let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(connection).await?;
        Ok(Self {
            rows_without_record: row.try_get(0)?,
            records_without_row: row.try_get(1)?,
            several_rows: row.try_get(2)?,
            other_rows: row.try_get(3)?,
        })
    }

    fn total(self) -> i64 {
        self.rows_without_record + self.records_without_row + self.several_rows + self.other_rows
    }
}

/// All rounds with one kind of standby.
pub(super) struct Trial {
    store: PostgresStore,
    is_synchronous: bool,
    failovers: u64,
    counts: Counts,
    torn: i64,
    /// The operations that have lasted so far, and must last.
    kept: Vec<(Operation, Found)>,
    waiting: i64,
    terminated: i64,
    outages: Vec<f64>,
    rounds_without_loss: Vec<u64>,
    errors: BTreeMap<String, u64>,
}

impl Trial {
    pub(super) fn new(store: PostgresStore, is_synchronous: bool) -> Self {
        Self {
            store,
            is_synchronous,
            failovers: 0,
            counts: Counts::default(),
            torn: 0,
            kept: Vec::new(),
            waiting: 0,
            terminated: 0,
            outages: Vec::new(),
            rounds_without_loss: Vec::new(),
            errors: BTreeMap::new(),
        }
    }

    /// Prints the header of the lines of rounds.
    pub(super) fn header() {
        println!(
            "round     primary  promoted  records    facts facts/s   alone   lost: lease settled commit  owners  again  \
             torn  no answer  errors  terminated"
        );
    }

    /// Looks up everything that was acknowledged in a round.
    pub(super) async fn round(
        &mut self,
        world: &World,
        operations: Vec<Operation>,
        round: Round,
        beside: &mut PgConnection,
    ) -> Result<(), Error> {
        // Before any operation runs again.
        let mut torn = Torn::look(beside).await?;
        let examined = examine(&self.store, operations).await?;
        let mut counts = Counts::default();
        for (operation, found) in &examined {
            counts.count(operation, found, &round.cut);
        }
        let repeated = Torn::look(beside).await?;
        if repeated.total() > torn.total() {
            torn = repeated;
        }
        let Told { longest_outage, troubles, .. } = world.told();
        let of = |what| counts.lost.get(&what).copied().unwrap_or_default();
        println!(
            "{:>5} {:>11} {:>7.2} s {:>8} {:>8} {:>7} {:>7} {:>13} {:>7} {:>6} {:>7} {:>6} {:>5} {:>8.1} s {:>7} {:>11}",
            round.number,
            round.story,
            round.took.as_secs_f64(),
            counts.records,
            counts.facts,
            round.facts_before,
            counts.told_alone,
            of(What::Lease),
            of(What::Settlement),
            of(What::Commit),
            counts.second_owners,
            counts.ran_again,
            torn.total(),
            longest_outage.as_secs_f64(),
            troubles.len(),
            round.terminated,
        );
        if torn.total() > 0 {
            println!("      {torn:?}");
        }
        by_kind(&troubles, &mut self.errors);
        if counts.lost() == 0 {
            self.rounds_without_loss.push(round.number);
        }
        self.failovers += 1;
        self.torn = self.torn.max(torn.total());
        self.waiting += round.cut.waiting;
        self.terminated += round.terminated;
        self.outages.push(longest_outage.as_secs_f64());
        self.counts.add(&counts);
        // A loss is counted once.
        let kept = examined.into_iter().filter(|(operation, found)| {
            let has_lasted = operation.facts(found).all(|(_, _, has_lasted)| has_lasted);
            has_lasted && !operation.has_second_owner && !operation.has_other_answer
        });
        self.kept.extend(kept);
        Ok(())
    }

    /// Looks once more at everything that survived its round, and reports.
    pub(super) async fn finish(
        mut self,
        report: &mut Report,
        asked_for: u64,
        beside: &mut PgConnection,
    ) -> Result<(), Error> {
        let kept = std::mem::take(&mut self.kept);
        let looked_for = kept.len();
        let later = lost_since(&self.store, kept).await?;
        self.torn = self.torn.max(Torn::look(beside).await?.total());
        let counts = self.counts.clone();
        report.fact("failovers", self.failovers);
        report.fact("records_acknowledged", counts.records);
        report.fact("facts_acknowledged", counts.facts);
        report.fact(
            "facts_lost",
            json!({"leases": counts.lost.get(&What::Lease), "settlements": counts.lost.get(&What::Settlement),
                "commits": counts.lost.get(&What::Commit), "found_only_after_later_rounds": later}),
        );
        report.fact("records_looked_for_once_more_at_the_end", looked_for);
        report.fact("facts_acknowledged_without_the_standby", counts.told_alone);
        report.fact("lost_although_the_standby_had_it", counts.lost_too_early);
        report.fact("kept_although_the_standby_cannot_have_it", counts.kept_too_late);
        report.fact("second_owners_at_most_once", counts.second_owners);
        report.fact("run_again_transactional", counts.ran_again);
        report.fact("rows_and_records_torn_apart", self.torn);
        report.fact("other_answers", counts.other_answers);
        report.fact("sessions_waiting_for_the_standby_when_it_was_cut_off", self.waiting);
        report.fact("sessions_terminated_while_they_waited", self.terminated);
        let longest = self.outages.iter().copied().fold(0.0, f64::max);
        report.fact("longest_time_without_an_answer_seconds", rounded(longest, 2));
        report.note(
            "times_without_an_answer_seconds",
            json!(self.outages.iter().map(|seconds| rounded(*seconds, 2)).collect::<Vec<_>>()),
        );
        report.fact("errors", json!(self.errors));
        self.expect(report, asked_for, later);
        Ok(())
    }

    fn expect(&self, report: &mut Report, asked_for: u64, later: u64) {
        let counts = &self.counts;
        report.expect(
            counts.records >= ENOUGH_RECORDS,
            format!("only {} records were acknowledged, fewer than {ENOUGH_RECORDS}", counts.records),
        );
        report.expect(
            self.failovers >= asked_for && asked_for > 0,
            format!("{} failovers of {asked_for}", self.failovers),
        );
        report.expect(self.torn == 0, format!("{} business writes and records were torn apart", self.torn));
        report.expect(counts.other_answers == 0, format!("{} answers were not their owner's", counts.other_answers));
        report.expect(later == 0, format!("{later} records were there after their failover, and not at the end"));
        let early = counts.lost_too_early;
        report.expect(early == 0, format!("{early} facts were lost that the standby had received"));
        let late = counts.kept_too_late;
        report.expect(late == 0, format!("{late} facts lasted that the standby cannot have received"));
        if self.is_synchronous {
            let lost = counts.lost();
            report.expect(lost == 0, format!("{lost} acknowledged facts were lost"));
            let (alone, owners, again) = (counts.told_alone, counts.second_owners, counts.ran_again);
            report.expect(alone == 0, format!("{alone} facts were acknowledged that the standby did not have"));
            report.expect(owners == 0, format!("{owners} keys had a second owner within the lease of the first"));
            report.expect(again == 0, format!("{again} committed operations ran again"));
            report.expect(self.waiting > 0, "nobody ever waited for the standby, so it was cut off without any effect");
            let tried = self.failovers < 2 || self.terminated > 0;
            report.expect(tried, "no session was terminated that waited for the standby");
        } else {
            let without = &self.rounds_without_loss;
            report.expect(
                without.is_empty(),
                format!("nothing was lost in the rounds {without:?}, so they did not show the window"),
            );
            println!(
                "  this is the window of asynchronous replication: what is lost is its end, and nothing before it"
            );
        }
    }
}

/// Looks up each operation on the new primary, in the ways that clients use.
async fn examine(store: &PostgresStore, operations: Vec<Operation>) -> Result<Vec<(Operation, Found)>, Error> {
    let looks = operations.into_iter().map(|operation| look(store, operation));
    futures_util::stream::iter(looks).buffer_unordered(AT_ONCE).try_collect().await
}

async fn look(store: &PostgresStore, mut operation: Operation) -> Result<(Operation, Found), Error> {
    let record = persist(|| store.peek(&operation.id)).await?;
    let found = operation.found(record.as_ref());
    if let (Found::Running { ours: true }, Some(lease)) = (&found, &operation.lease) {
        let renewed = persist(|| store.renew(lease, TERM)).await?;
        operation.has_second_owner |= renewed != OwnerOutcome::Applied;
    }
    let asked = request(&operation, OwnerToken::random());
    match operation.contract {
        Contract::AtMostOnce => {
            let outcome = persist(|| store.acquire(&asked)).await?;
            let is_replay = matches!(outcome, AcquireOutcome::Replay(_));
            operation.has_other_answer |= is_replay != (found == Found::Settled);
            judge(&mut operation, &outcome);
        }
        Contract::Transactional if found == Found::Nothing => {
            // Its client asks again, and it runs as if for the first time.
            let again = Operation { owner: OwnerToken::random(), ..operation.clone() };
            let ran = persist(|| transact(store, &again)).await?;
            operation.has_second_owner = true;
            operation.has_other_answer |= !matches!(ran, Ran::Committed);
        }
        Contract::Transactional => {
            let outcome = persist(|| async { store.begin(&asked).await.map(outcome_of) }).await?;
            judge(&mut operation, &outcome);
        }
    }
    Ok((operation, found))
}

/// Counts the operations that changed.
async fn lost_since(store: &PostgresStore, operations: Vec<(Operation, Found)>) -> Result<u64, Error> {
    let looks = operations.into_iter().map(|(operation, before)| async move {
        let record = persist(|| store.peek(&operation.id)).await?;
        Ok::<_, Error>(u64::from(operation.found(record.as_ref()) != before))
    });
    let lost: Vec<u64> = futures_util::stream::iter(looks).buffer_unordered(AT_ONCE).try_collect().await?;
    Ok(lost.into_iter().sum())
}
