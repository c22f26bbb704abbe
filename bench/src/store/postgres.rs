//! Postgres: `pgbench` with hand-written statements, and the store, on one server.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use idem_core::{Begin, OwnerOutcome, TransactionalStore, Writes};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use idem_servers::Postgres;

use super::by_hand::ByHand;
use super::crowd::{CLIENTS, crowd, replays};
use crate::contest::{Contestant, Outcome, hold, p50, per_second};
use crate::drive::{Work, driven};
use crate::error::Error;
use crate::judged::Goal;
use crate::outside::pgbench;
use crate::pace::Pace;
use crate::records::{DAY, Maker};
use crate::report::Report;
use crate::servers;

pub(crate) async fn run(server: &Postgres, pace: Pace, report: &mut Report) -> Result<(), Error> {
    let mut connection = servers::connect(server).await?;
    servers::run(&mut connection, include_str!("../../sql/schema.sql")).await?;
    let numbers = Arc::new(AtomicU64::new(replays(pace)));
    let contestants = Contestants::open(server.port(), pace, numbers).await?;

    let crowd = contestants.cycles(CLIENTS, "").await?;
    judge(report, "Postgres leased cycles/s against two hand-written statements, 64 clients", 3.0, &crowd);
    report.add(crowd);
    let larger = contestants.cycles(256, "").await?;
    judge(report, "Postgres leased cycles/s against two hand-written statements, 256 clients", 5.0, &larger);
    report.add(larger);
    let alone = contestants.cycles(1, "").await?;
    report.judge(
        "Postgres leased cycle's p50 against two hand-written statements, 1 client",
        Goal::AtMost(1.15),
        alone.ratio("idem", "by hand", p50),
    );
    report.judge(
        "Postgres leased cycle's p50 against two statements through a pool of sqlx, 1 client",
        Goal::AtMost(1.15),
        alone.ratio("idem", IN_SQLX, p50),
    );
    report.add(alone);

    let transactions = contestants.transactions(CLIENTS, "").await?;
    judge(report, "Postgres transactional requests/s against six hand-written round trips", 1.8, &transactions);
    report.judge(
        "Postgres transactional requests/s against six round trips through a pool of sqlx",
        Goal::AtLeast(1.15),
        transactions.ratio("idem", IN_SQLX, per_second),
    );
    let bare = transactions.ratio("idem", "bare write", per_second);
    report.judge("Postgres transactional requests/s against the bare business write", Goal::AtLeast(0.6), bare);
    report.add(transactions);

    contestants.fill().await?;
    servers::run(&mut connection, "VACUUM ANALYZE;\nCHECKPOINT").await?;
    let alone = contestants.replays(1, "").await?;
    judge(report, "Postgres replays/s against selecting the row, 1 client", 0.9, &alone);
    report.judge(
        "Postgres replays/s against selecting the row through a pool of sqlx, 1 client",
        Goal::AtLeast(0.9),
        alone.ratio("idem", IN_SQLX, per_second),
    );
    report.add(alone);
    let crowd = contestants.replays(CLIENTS, "").await?;
    judge(report, "Postgres replays/s against selecting the row, 64 clients", 1.5, &crowd);
    report.add(crowd);
    Ok(())
}

/// The contestant that does by sqlx what `pgbench` does.
const IN_SQLX: &str = "by hand, sqlx";

fn judge(report: &mut Report, what: &str, least: f64, outcome: &Outcome) {
    report.judge(what, Goal::AtLeast(least), outcome.ratio("idem", "by hand", per_second));
}

/// The store and hand-written statements, over one port. `how` says what is unusual about a contest.
pub(crate) struct Contestants {
    port: u16,
    pace: Pace,
    maker: Arc<Maker>,
    store: PostgresStore,
    by_hand: ByHand,
    /// The next unused number; the smaller ones are the keys of replays.
    numbers: Arc<AtomicU64>,
}

impl Contestants {
    /// `numbers` begin above those of existing records.
    pub(crate) async fn open(port: u16, pace: Pace, numbers: Arc<AtomicU64>) -> Result<Self, Error> {
        // As many handlers at once as pgbench has clients, so that no handler waits for a transaction.
        let transactions = NonZeroU32::try_from(u32::try_from(CLIENTS)?)?;
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
        let by_hand = ByHand::open(&url)?;
        let store = PostgresStore::open(PostgresConfig::new(url).max_transactions(transactions)).await?;
        let maker = Maker::new(Arc::new(store.clone()));
        Ok(Self { port, pace, maker, store, by_hand, numbers })
    }

    /// Makes the records that replays ask for.
    pub(crate) async fn fill(&self) -> Result<(), Error> {
        self.maker.fill(replays(self.pace)).await
    }

    fn by_hand(&self, name: &'static str, script: &'static str, clients: usize) -> Contestant<'_> {
        Contestant::new(name, move |_| pgbench(self.port, script, clients, self.pace.turn))
    }

    /// The same through sqlx, for as many clients as its pool has connections.
    fn in_sqlx<W>(
        &self,
        clients: usize,
        numbers: &Arc<AtomicU64>,
        work: impl Fn(ByHand, i64) -> W + Clone + Send + 'static,
    ) -> Option<Contestant<'_>>
    where
        W: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let by_hand = self.by_hand.clone();
        let work = move |number: u64| -> Work {
            let (by_hand, work) = (by_hand.clone(), work.clone());
            Box::pin(async move { work(by_hand, i64::try_from(number)?).await })
        };
        (clients <= CLIENTS).then(|| driven(IN_SQLX, clients, self.pace.turn, numbers, work))
    }

    pub(crate) async fn cycles(&self, clients: usize, how: &str) -> Result<Outcome, Error> {
        let idem = driven("idem", clients, self.pace.turn, &self.numbers, self.maker.cycles());
        let name = format!("Postgres: acquire and settle, {}{how}", crowd(clients));
        let in_sqlx =
            self.in_sqlx(clients, &self.numbers, |by_hand, number| async move { by_hand.cycle(number).await });
        let by_hand = self.by_hand("by hand", "two_statements.sql", clients);
        hold(&name, self.pace.rounds, [Some(by_hand), in_sqlx, Some(idem)].into_iter().flatten().collect()).await
    }

    pub(crate) async fn transactions(&self, clients: usize, how: &str) -> Result<Outcome, Error> {
        let (maker, store) = (Arc::clone(&self.maker), self.store.clone());
        let pay = move |number| -> Work {
            let (maker, store) = (Arc::clone(&maker), store.clone());
            Box::pin(async move { pay(&maker, &store, number).await })
        };
        let idem = driven("idem", clients, self.pace.turn, &self.numbers, pay);
        let by_hand = self.by_hand("by hand", "six_round_trips.sql", clients);
        let bare = self.by_hand("bare write", "bare_transaction.sql", clients);
        let name = format!("Postgres: a business write in a transaction, {}{how}", crowd(clients));
        let in_sqlx =
            self.in_sqlx(clients, &self.numbers, |by_hand, number| async move { by_hand.transaction(number).await });
        let contestants = [Some(by_hand), in_sqlx, Some(idem), Some(bare)];
        hold(&name, self.pace.rounds, contestants.into_iter().flatten().collect()).await
    }

    pub(crate) async fn replays(&self, clients: usize, how: &str) -> Result<Outcome, Error> {
        let idem = driven("idem", clients, self.pace.turn, &Arc::default(), self.maker.replays(replays(self.pace)));
        let name = format!("Postgres: replay, {}{how}", crowd(clients));
        let most = replays(self.pace).cast_signed();
        let in_sqlx = self.in_sqlx(clients, &Arc::default(), move |by_hand, number| {
            let number = number % most + 1;
            async move { by_hand.replay(number).await }
        });
        let by_hand = self.by_hand("by hand", "replay.sql", clients);
        hold(&name, self.pace.rounds, [Some(by_hand), in_sqlx, Some(idem)].into_iter().flatten().collect()).await
    }
}

/// A handler's write, its record and its answer in one transaction.
async fn pay(maker: &Maker, store: &PostgresStore, number: u64) -> Result<(), Error> {
    let Begin::Acquired { mut transaction, .. } = store.begin(&maker.request(number)).await? else {
        return Err(format!("record {number} was there already").into());
    };
    let business =
        transaction.as_any_mut().downcast_mut::<PostgresTransaction>().ok_or("another kind of transaction")?;
    let account = i64::try_from(number)?;
    sqlx::query("INSERT INTO ledger (account, amount, memo) VALUES ($1, 100, 'pay') RETURNING id")
        .bind(account)
        .fetch_one(&mut **business)
        .await?;
    match transaction.finish(&maker.settlement(), DAY, Writes::Keep).await? {
        OwnerOutcome::Applied => Ok(()),
        OwnerOutcome::LeaseLost => Err(format!("the lease of record {number} was lost").into()),
    }
}
