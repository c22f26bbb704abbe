//! A client that repeats a request until it knows the outcome, and the operation that it requests.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Contract, Disposition, ExecuteError, Operation};
use idem_core::{Fingerprint, IdempotencyKey, ReplayKind, Scope, StoreError, StoredResponse, Writes};
use idem_postgres::PostgresTransaction;
use sqlx::PgPool;
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use super::ledger::End;
use super::{LEASE, MARGIN, World};
use crate::Error;
use crate::random::Random;
use crate::records::response;

/// The percentage of operations that repeat a key.
const REPEATS: u64 = 20;

/// The percentage of requests that an impatient client gives up.
const IMPATIENT: u64 = 3;

/// The longest pause before a client repeats a request without a definite answer.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Client {
    pub(super) world: Arc<World>,
    pub(super) random: Random,
    /// Half of the repeats choose among this many newest keys, most of which are running.
    pub(super) newest: u64,
    pub(super) recent: NonZeroU64,
}

impl Client {
    pub(super) async fn work(mut self) {
        while !self.world.over.load(Ordering::Relaxed) {
            let key = self.key();
            self.world.ledger.count("operations");
            self.operate(key).await;
        }
    }

    fn key(&mut self) -> u64 {
        let keys = self.world.ledger.keys();
        if keys == 0 || !self.random.chance(REPEATS) {
            return self.world.ledger.new_key();
        }
        self.world.ledger.count("repeated_operations");
        let among = if self.random.chance(50) { self.newest } else { self.recent.get() };
        keys - 1 - self.random.below(among.min(keys))
    }

    /// Requests one operation until there is a definite answer, or until the time limit is certainly missed.
    async fn operate(&mut self, key: u64) {
        let world = Arc::clone(&self.world);
        let started = Instant::now();
        let give_up_at = started + 2 * (LEASE + MARGIN);
        while Instant::now() < give_up_at {
            let patience = self.random.chance(IMPATIENT).then(|| Duration::from_millis(self.random.below(15)));
            let wait = Duration::from_millis(if self.random.chance(50) { 0 } else { 200 });
            let process = self.random.below(2);
            match ask(&world, process, key, wait, patience).await {
                Ok(Asked::Ended(end)) => return world.ledger.answered(key, &end, started.elapsed()),
                Ok(Asked::Later(after)) => {
                    let longest = after.min(PAUSE).as_millis() as u64;
                    sleep(Duration::from_millis(1 + self.random.below(longest))).await;
                }
                Err(kind) => {
                    world.ledger.error(kind);
                    sleep(Duration::from_millis(1 + self.random.below(20))).await;
                }
            }
        }
        world.ledger.count("keys_without_an_answer");
    }
}

/// After the sabotage, requests a key once more; the answer must be the same as before.
pub(super) async fn ask_again(world: &Arc<World>, key: u64) -> Result<(), Error> {
    let started = Instant::now();
    let answer = ask(world, key, key, LEASE, None).await;
    match answer {
        Ok(Asked::Ended(end)) => {
            world.ledger.count("asked_again");
            world.ledger.answered(key, &end, started.elapsed());
            Ok(())
        }
        Ok(Asked::Later(after)) => Err(format!("key {key} still has no answer; it says to ask in {after:?}").into()),
        Err(kind) => Err(format!("key {key}: {kind}, without sabotage").into()),
    }
}

enum Asked {
    Ended(End),
    Later(Duration),
}

type Done = Result<StoredResponse, StoredResponse>;

/// Sends one request to one process. An error is named by its kind.
async fn ask(
    world: &Arc<World>,
    process: u64,
    key: u64,
    wait: Duration,
    patience: Option<Duration>,
) -> Result<Asked, String> {
    let name = format!("{}-{key}", world.name);
    let process = world.processes.process(process);
    let key = name.parse::<IdempotencyKey>().map_err(|error| error.to_string())?;
    let fingerprint = Fingerprint::of_bytes("pay", name.as_bytes());
    let operation = Operation::new(Scope::new("tenant-4711", "pay"), key, fingerprint).wait(wait);
    let (contract, business) = (world.contract, process.business.clone());
    let run = move |context| operate(context, contract, business, name);
    let idempotency = process.idempotency.clone();
    let asking = async move { idempotency.execute(operation, run, || failed("panicked")).await };
    let mut asked = process.handle.spawn(asking);
    let answer = match patience {
        None => asked.await,
        Some(patience) => match timeout(patience, &mut asked).await {
            Ok(answer) => answer,
            Err(_) => {
                asked.abort();
                return Err("the client went away".into());
            }
        },
    };
    let answer = answer.map_err(|_| "the process died".to_owned())?.map_err(|error| kind(&error))?;
    world.ledger.count(match &answer {
        Answer::Ran { .. } => "runs",
        Answer::Replay(_) => "replays",
        Answer::InProgress { .. } => "in_progress",
        Answer::Backoff { .. } => "backoffs",
        Answer::Mismatch => "mismatches",
    });
    match answer {
        Answer::Ran { value: Ok(response), .. } => Ok(Asked::Ended(End { kind: ReplayKind::Completed, response })),
        // The record says what repeats get.
        Answer::Ran { value: Err(response), .. } if contract == Contract::AtMostOnce => {
            world.ledger.error("the operation failed for good".into());
            Ok(Asked::Ended(End { kind: ReplayKind::Failed, response }))
        }
        Answer::Ran { .. } => Err("the operation failed, and may run again".into()),
        Answer::Replay(replay) => Ok(Asked::Ended(replay.into())),
        Answer::InProgress { retry_after } | Answer::Backoff { retry_after } => Ok(Asked::Later(retry_after)),
        Answer::Mismatch => Err("a mismatch".into()),
    }
}

fn kind(error: &ExecuteError) -> String {
    let of = |what: &str, error: &StoreError| format!("{what}: {:?}", error.kind());
    match error {
        ExecuteError::NotAdmitted(error) => of("not admitted", error),
        ExecuteError::CommitUnclear(error) => of("commit unclear", error),
        other => other.to_string(),
    }
}

/// The operation: it writes a row, and gives an answer that no other run gives.
async fn operate(context: Context, contract: Contract, business: PgPool, key: String) -> Conclusion<Done> {
    let mut random = Random::new();
    let nonce = Uuid::new_v4().simple().to_string();
    sleep(Duration::from_millis(random.below(8))).await;
    let written = match contract {
        Contract::Transactional => match context.transaction::<PostgresTransaction>() {
            Ok(mut transaction) => write(&mut **transaction, &key, context.attempt(), &nonce).await,
            Err(error) => return failed(&error.to_string()),
        },
        Contract::AtMostOnce | Contract::AtLeastOnce => write(&business, &key, context.attempt(), &nonce).await,
    };
    sleep(Duration::from_millis(random.below(8))).await;
    if written.is_err() {
        return failed(&nonce);
    }
    let response = response(300, &nonce);
    let disposition = Disposition::Complete { response: response.clone(), writes: Writes::Keep };
    Conclusion { value: Ok(response), disposition, retention: None }
}

async fn write<'c, E>(executor: E, key: &str, attempt: u32, nonce: &str) -> Result<(), sqlx::Error>
where
    E: sqlx::Executor<'c, Database = sqlx::Postgres>,
{
    let insert = sqlx::query("INSERT INTO business (key, attempt, nonce) VALUES ($1, $2, $3)");
    insert.bind(key).bind(i64::from(attempt)).bind(nonce).execute(executor).await.map(drop)
}

fn failed(why: &str) -> Conclusion<Done> {
    let response = StoredResponse::new(500, why.to_owned());
    Conclusion { value: Err(response.clone()), disposition: Disposition::Fault { response }, retention: None }
}
