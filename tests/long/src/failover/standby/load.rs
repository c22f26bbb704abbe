//! Clients of two processes, which record the answers that they get.

use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, OwnerToken, RecordId, ReplayKind, Scope,
    Settlement, StoredBody, Takeover, TransactionalStore, Writes,
};
use idem_postgres::{PostgresStore, PostgresTransaction};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::operation::{Contract, Fact, Operation};
use crate::Error;
use crate::failover::request::{fresh_id, request as request_of_any};
use crate::failover::world::World;
use crate::random::Random;
use crate::records::DAY;

/// The table of the business writes: one row for each operation under Transactional.
pub(super) const TABLE: &str = "CREATE TABLE business (id BYTEA NOT NULL, answer BYTEA NOT NULL)";

/// The operation name that identifies records of transactional operations.
pub(super) const TRANSACTIONAL: &str = "transactional";

/// How many times a verb is sent if no answer comes, as by the engine.
const TRIES: usize = 2;

/// The longest pause between two operations of a client, and after an error, in milliseconds.
const PAUSE_MS: u64 = 40;

/// The clients of a round, with the answers that they got.
#[derive(Debug)]
pub(super) struct Load(JoinSet<Vec<Operation>>);

impl Load {
    pub(super) fn start(world: &Arc<World>, processes: &[PostgresStore; 2], clients: u64) -> Self {
        let mut tasks = JoinSet::new();
        for number in 0..clients {
            let (own, rival) = if number % 2 == 0 { (0, 1) } else { (1, 0) };
            let contract = if number / 2 % 2 == 0 { Contract::AtMostOnce } else { Contract::Transactional };
            let client = Client {
                world: Arc::clone(world),
                own: processes[own].clone(),
                rival: processes[rival].clone(),
                random: Random::new(),
            };
            tasks.spawn(client.work(contract));
        }
        Self(tasks)
    }

    /// Waits for pending operations and returns all of them.
    pub(super) async fn end(mut self) -> Result<Vec<Operation>, Error> {
        let mut operations = Vec::new();
        while let Some(ended) = self.0.join_next().await {
            operations.extend(ended?);
        }
        Ok(operations)
    }
}

struct Client {
    world: Arc<World>,
    own: PostgresStore,
    rival: PostgresStore,
    random: Random,
}

impl Client {
    async fn work(mut self, contract: Contract) -> Vec<Operation> {
        let mut operations = Vec::new();
        while !self.world.is_over() {
            let mut operation = Operation::new(fresh_id(self.world.round), contract);
            match contract {
                Contract::AtMostOnce => self.run_leased(&mut operation).await,
                Contract::Transactional => self.run_transactional(&mut operation).await,
            }
            if operation.is_acknowledged() {
                operations.push(operation);
            }
            self.pause().await;
        }
        operations
    }

    async fn run_leased(&mut self, operation: &mut Operation) {
        self.acquire(operation).await;
        if self.random.chance(25) {
            self.compete(operation).await;
        }
        // The other leases are held for longer than the check takes.
        if self.random.chance(80) {
            self.pause().await;
            self.settle(operation).await;
            self.compete(operation).await;
        }
    }

    async fn acquire(&mut self, operation: &mut Operation) {
        let asked_for = request(operation, operation.owner);
        for _ in 0..TRIES {
            let asked = Instant::now();
            match self.world.hear(self.own.acquire(&asked_for).await) {
                Some(AcquireOutcome::Acquired(lease)) => {
                    operation.leased = Some(self.fact(asked));
                    operation.lease = Some(lease);
                    return;
                }
                Some(_) => {
                    operation.has_other_answer = true;
                    return;
                }
                None => self.pause().await,
            }
        }
    }

    async fn settle(&mut self, operation: &mut Operation) {
        let Some(lease) = operation.lease.clone() else { return };
        let settlement = Settlement::Completed(operation.answer());
        for _ in 0..TRIES {
            let asked = Instant::now();
            match self.world.hear(self.own.settle(&lease, &settlement, DAY).await) {
                Some(OwnerOutcome::Applied) => {
                    operation.settled = Some(self.fact(asked));
                    return;
                }
                // What the new primary holds shows whether that is so.
                Some(OwnerOutcome::LeaseLost) => return,
                None => self.pause().await,
            }
        }
    }

    /// Runs it, and a second time if the first outcome is not known.
    async fn run_transactional(&mut self, operation: &mut Operation) {
        for _ in 0..TRIES {
            operation.owner = OwnerToken::random();
            let asked = Instant::now();
            match transact(&self.own, operation).await {
                Ok(Ran::Committed) => {
                    self.world.hear(Ok(()));
                    operation.settled = Some(self.fact(asked));
                    break;
                }
                // An earlier try committed it without an answer.
                Ok(Ran::Answered) => break,
                Ok(Ran::Failed) => {}
                Err(error) => {
                    self.world.hear::<()>(Err(error));
                }
            }
            self.pause().await;
        }
        if operation.settled.is_some() && self.random.chance(25) {
            self.compete(operation).await;
        }
    }

    /// Asks for it as another client.
    async fn compete(&mut self, operation: &mut Operation) {
        let asked_for = request(operation, OwnerToken::random());
        let outcome = match operation.contract {
            Contract::AtMostOnce => self.rival.acquire(&asked_for).await,
            Contract::Transactional => self.rival.begin(&asked_for).await.map(outcome_of),
        };
        if let Some(outcome) = self.world.hear(outcome) {
            judge(operation, &outcome);
        }
    }

    fn fact(&self, asked: Instant) -> Fact {
        self.world.fact(true);
        Fact { asked, told: Instant::now() }
    }

    async fn pause(&mut self) {
        sleep(Duration::from_millis(self.random.below(PAUSE_MS))).await;
    }
}

/// Checks the answer that a client other than the owner got.
pub(super) fn judge(operation: &mut Operation, outcome: &AcquireOutcome) {
    match outcome {
        AcquireOutcome::Acquired(_) => operation.has_second_owner |= operation.is_acknowledged(),
        AcquireOutcome::InProgress { .. } => {}
        AcquireOutcome::Replay(replay) => {
            let same = replay.kind == ReplayKind::Completed && replay.response == operation.answer();
            operation.has_other_answer |= !same;
        }
        AcquireOutcome::Backoff { .. } | AcquireOutcome::Mismatch { .. } => operation.has_other_answer = true,
    }
}

/// The acquire of an operation. After its lease has expired, its outcome is unknown.
pub(super) fn request(operation: &Operation, owner: OwnerToken) -> Acquire {
    let mut request = Acquire { takeover: Takeover::Unknown, ..request_of_any(operation.id, owner) };
    if operation.contract == Contract::Transactional {
        request.origin.scope = Scope::new("tenant-4711", TRANSACTIONAL);
    }
    request
}

/// How a transactional run ended.
#[derive(Debug)]
pub(super) enum Ran {
    Committed,
    /// It did not run.
    Answered,
    /// The business write did not succeed.
    Failed,
}

/// Runs an operation in a transaction: a business write, and the record.
pub(super) async fn transact(store: &PostgresStore, operation: &Operation) -> Result<Ran, idem_core::StoreError> {
    let mut transaction = match store.begin(&request(operation, operation.owner)).await? {
        Begin::Acquired { transaction, .. } => transaction,
        Begin::Answered(_) => return Ok(Ran::Answered),
    };
    let response = operation.answer();
    let StoredBody::Retained(answer) = &response.body else { return Ok(Ran::Failed) };
    let Some(connection) = transaction.as_any_mut().downcast_mut::<PostgresTransaction>() else {
        return Ok(Ran::Failed);
    };
    let insert = sqlx::query("INSERT INTO business (id, answer) VALUES ($1, $2)");
    let insert = insert.bind(bytes(&operation.id)).bind(answer.as_ref());
    if insert.execute(&mut **connection).await.is_err() {
        return Ok(Ran::Failed);
    }
    match transaction.finish(&Settlement::Completed(response.clone()), DAY, Writes::Keep).await? {
        OwnerOutcome::Applied => Ok(Ran::Committed),
        OwnerOutcome::LeaseLost => Ok(Ran::Failed),
    }
}

fn bytes(id: &RecordId) -> &[u8] {
    id.as_bytes()
}

/// The outcome for a client that only asks; a transaction that would begin is rolled back.
pub(super) fn outcome_of(begin: Begin) -> AcquireOutcome {
    match begin {
        Begin::Acquired { lease, .. } => AcquireOutcome::Acquired(lease),
        Begin::Answered(outcome) => outcome,
    }
}
