//! Operations on disk, in SQLite, from before their first send until they have a final answer.

mod entry;
mod error;
mod kept;
mod owners;
mod pending;
mod schema;
mod time;
mod trust;

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Sqlite, SqlitePool, Transaction};

pub use error::{JournalError, JournalErrorKind};
pub use pending::{JournaledAnswer, PendingOperation, ResumeError};
pub use trust::ClockFault;

use error::of_sqlite;
use owners::Owner;
use time::{millis, tick};

/// How long final answers are kept by default: a process that died between an answer and its use finds it when it is restarted
/// within a day.
const KEEP_ANSWERS: Duration = Duration::from_secs(24 * 60 * 60);

/// How much final answers take together by default, with their requests.
const KEEP_BYTES: u64 = 64 * 1024 * 1024;

/// Where the journal is, and how long it keeps answers.
#[derive(Debug, Clone)]
pub struct JournalConfig {
    path: PathBuf,
    keep_answers: Duration,
    keep_bytes: u64,
    busy_timeout: Duration,
}

impl JournalConfig {
    /// The journal in this file, on a local disk. A missing file is made, with access for its owner only.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            keep_answers: KEEP_ANSWERS,
            keep_bytes: KEEP_BYTES,
            busy_timeout: Duration::from_secs(5),
        }
    }

    /// How long final answers are kept. Zero removes an operation with its answer.
    ///
    /// Default 24 h, so that a process that died between an answer and its use finds the answer later. Between two uses of the
    /// journal, at most 10 min of this time pass, so that a clock that jumps ahead removes no answers. A journal that is seldom
    /// used keeps answers for longer.
    #[must_use]
    pub fn keep_answers(mut self, keep: Duration) -> Self {
        self.keep_answers = keep;
        self
    }

    /// How many bytes final answers may take together, with their requests: bodies and header fields. If they take more, the oldest
    /// lose them, and [`Journal::answers`] does not list them any more. An answer that alone is larger is not kept. That the key was
    /// used stays known for [`keep_answers`](Self::keep_answers). Operations without an answer do not count, and are all kept.
    ///
    /// Default 64 MiB: the journal of a busy client does not fill its disk, and there is room for tens of thousands of usual
    /// answers, or for 64 of those that are just small enough for the default of
    /// [`Settings::body_limit`](crate::Settings::body_limit).
    #[must_use]
    pub fn keep_bytes(mut self, bytes: u64) -> Self {
        self.keep_bytes = bytes;
        self
    }

    /// How long a write waits for that of another process. Default 5 s.
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout;
        self
    }
}

/// Keeps operations on disk until they have a final answer. Clones share one journal.
///
/// Any number of processes of one machine can use one file. Each operation is sent by one of them at a time, whatever their
/// clocks say: a process that sends holds a lock of the operating system, which ends with the process.
///
/// Method, URL, body and header fields are stored in clear. Fields with credentials are not: `Authorization`, `Cookie`,
/// `Proxy-Authorization`, and values that are marked as sensitive. Give them again to [`resume`](Self::resume).
#[derive(Debug, Clone)]
pub struct Journal {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    pool: SqlitePool,
    limits: Limits,
    /// Dropped when no clone and no operation of this journal is left.
    owner: Owner,
    /// The operations that this process sends now.
    running: Mutex<HashSet<String>>,
}

impl Journal {
    /// Opens a journal, and removes answers that have been kept for long enough, or take too much.
    ///
    /// # Errors
    /// If the file cannot be used: it is damaged, of another program, or of a newer version.
    pub async fn open(config: JournalConfig) -> Result<Self, JournalError> {
        let JournalConfig { path, keep_answers, keep_bytes, busy_timeout } = config;
        let limits = Limits { keep: keep_answers, bytes: i64::try_from(keep_bytes).unwrap_or(i64::MAX) };
        let files = |error: io::Error| {
            let message = "the journal's file cannot be made; check its path and the modes of its folder";
            JournalError::new(JournalErrorKind::Unavailable, message).with_source(error)
        };
        make_private(&path).map_err(files)?;
        // The files of owners are found by it, whatever link leads here, and whatever folder the process changes to.
        let path = path.canonicalize().map_err(files)?;
        let options = SqliteConnectOptions::new().filename(&path).synchronous(SqliteSynchronous::Full);
        let options = options.busy_timeout(busy_timeout).foreign_keys(false);
        // SQLite has one writer, and nothing here takes long.
        let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await;
        let pool = pool.map_err(|error| of_sqlite("open its file", error))?;
        let checked: Result<String, _> = sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(&pool).await;
        if checked.map_err(|error| of_sqlite("check its file", error))? != "ok" {
            let message = "the journal's file is damaged; move it away, and find out what became of its operations";
            return Err(JournalError::new(JournalErrorKind::Corrupt, message));
        }
        let mut transaction = lock(&pool).await?;
        schema::prepare(&mut transaction).await?;
        tick(&mut transaction).await?;
        owners::remove_dead(&path).map_err(files)?;
        let owner = Owner::register(&path).map_err(files)?;
        limits.enforce(&mut transaction).await?;
        commit(transaction).await?;
        // After the check, so that a file of another program stays as it is. The mode is kept in the file.
        let mode = sqlx::raw_sql("PRAGMA journal_mode = WAL").execute(&pool).await;
        mode.map_err(|error| of_sqlite("change its mode", error))?;
        Ok(Self { shared: Arc::new(Shared { path, pool, limits, owner, running: Mutex::default() }) })
    }
}

/// An operation that this process sends, until this value is dropped.
#[derive(Debug)]
struct Running {
    shared: Arc<Shared>,
    id: String,
}

impl Running {
    /// Marks an operation; `None` if this process sends it already.
    fn mark(shared: &Arc<Shared>, id: &str) -> Option<Self> {
        let mut running = shared.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.insert(id.to_owned()).then(|| Self { shared: Arc::clone(shared), id: id.to_owned() })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// Begins a transaction, and notes the present time.
async fn begin(pool: &SqlitePool) -> Result<Transaction<'static, Sqlite>, JournalError> {
    let mut transaction = lock(pool).await?;
    tick(&mut transaction).await?;
    Ok(transaction)
}

/// Takes the write lock first, so that what is read stays true until the commit.
async fn lock(pool: &SqlitePool) -> Result<Transaction<'static, Sqlite>, JournalError> {
    pool.begin_with("BEGIN IMMEDIATE").await.map_err(|error| of_sqlite("begin a transaction", error))
}

async fn commit(transaction: Transaction<'static, Sqlite>) -> Result<(), JournalError> {
    transaction.commit().await.map_err(|error| of_sqlite("write to the disk", error))
}

/// What is kept of answers.
#[derive(Debug, Clone, Copy)]
struct Limits {
    keep: Duration,
    bytes: i64,
}

impl Limits {
    /// Removes answers that are too old by the journal's own clock, which does not jump, and the contents of the oldest ones if all
    /// take too much. What is left says that the key was used, and when.
    async fn enforce(self, transaction: &mut Transaction<'_, Sqlite>) -> Result<(), JournalError> {
        let failed = |error| of_sqlite("remove old answers", error);
        let old = "DELETE FROM operations WHERE answered_used_ms <= (SELECT used_ms FROM clock) - ?";
        sqlx::query(old).bind(millis(self.keep)).execute(&mut **transaction).await.map_err(failed)?;
        let oldest = "UPDATE operations
            SET headers = x'', body = x'', answer_headers = NULL, answer_body = NULL, answer_bytes = 0
            WHERE id = (SELECT id FROM operations WHERE answer_bytes > 0 ORDER BY answer_number LIMIT 1)
            AND (SELECT bytes FROM answers) > ?";
        while sqlx::query(oldest).bind(self.bytes).execute(&mut **transaction).await.map_err(failed)?.rows_affected()
            > 0
        {}
        Ok(())
    }
}

/// Makes the file, unless it is there, with access for its owner only: it has bodies of requests.
fn make_private(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.truncate(false).open(path).map(drop)
}
