//! Readers: a few tasks with a connection each. In write-ahead mode, they never wait for the writer.
//!
//! Questions that arrive while a task reads gather, and its next statement reads them together. An exchange with the thread
//! of a connection costs more than SQLite takes to find a row.
//!
//! The tasks share one fate. If one of them panics, the others end as well, their callers get an error at once, and the next
//! caller starts all of them again.

use std::sync::Arc;

use idem_core::{Record, RecordId, StoreError};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;

use crate::error::store_error;
use crate::queue::Queue;
use crate::row::{Found, load};

/// Two, so that one of them can answer while the other one reads a large answer.
const TASKS: usize = 2;

/// The most records in one statement. It is enough to share the costs of a statement. It is also so few that sixteen of the
/// largest answers fit into memory, and that the first caller does not wait long for the last.
const MAX_BATCH: usize = 16;

pub(crate) struct Question {
    id: RecordId,
    answer: oneshot::Sender<Result<Option<Record>, StoreError>>,
}

/// A handle to the readers.
#[derive(Debug, Clone)]
pub(crate) struct Readers(Queue<Question>);

impl Readers {
    pub(crate) fn start(options: SqliteConnectOptions) -> Self {
        Self(Queue::start(move |questions| serve(options.clone(), questions)))
    }

    /// The record with this id, expired or not.
    pub(crate) async fn read(&self, id: RecordId) -> Result<Option<Record>, StoreError> {
        self.0.ask(|answer| Question { id, answer }).await?
    }
}

/// Runs the readers until their queue is closed, or one of them panics; that aborts the others.
async fn serve(options: SqliteConnectOptions, questions: mpsc::Receiver<Question>) {
    let questions = Arc::new(Mutex::new(questions));
    let mut readers = JoinSet::new();
    for _ in 0..TASKS {
        let reader = Reader { connection: None, options: options.clone() };
        readers.spawn(reader.serve(Arc::clone(&questions)));
    }
    drop(questions);
    while let Some(Ok(())) = readers.join_next().await {}
}

struct Reader {
    /// `None` before the first read and after a failed one.
    connection: Option<SqliteConnection>,
    options: SqliteConnectOptions,
}

impl Reader {
    async fn serve(mut self, queue: Arc<Mutex<mpsc::Receiver<Question>>>) {
        let mut batch = Vec::with_capacity(MAX_BATCH);
        loop {
            let next = async { queue.lock().await.recv_many(&mut batch, MAX_BATCH).await };
            if next.await == 0 {
                break;
            }
            self.answer(&mut batch).await;
        }
        if let Some(connection) = self.connection.take() {
            // The connection has no open transaction.
            let _ = connection.close().await;
        }
    }

    async fn answer(&mut self, batch: &mut Vec<Question>) {
        // A caller that has stopped waiting needs no answer.
        batch.retain(|question| !question.answer.is_closed());
        let mut ids: Vec<_> = batch.iter().map(|question| question.id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            return;
        }
        let found = self.find(&ids).await;
        if let Err(error) = &found {
            tracing::warn!(error = error as &dyn std::error::Error, records = ids.len(), "records could not be read");
        }
        for Question { id, answer } in batch.drain(..) {
            let row = found.as_ref().and_then(|found| found.get(&id).map(Result::as_ref).transpose());
            let record = row.map(|row| row.map(|row| row.record.clone())).map_err(StoreError::clone);
            // A caller that stopped waiting meanwhile will ask again.
            let _ = answer.send(record);
        }
    }

    async fn find(&mut self, ids: &[RecordId]) -> Result<Found, StoreError> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.options.connect().await.map_err(|error| store_error("open the database", error))?,
        };
        let found = load(&mut connection, "", ids).await.map_err(|error| store_error("read records", error))?;
        self.connection = Some(connection);
        Ok(found)
    }
}
