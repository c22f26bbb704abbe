//! Reading, without waiting for the writer: a few tasks with a connection each, as in write-ahead mode readers wait for nobody.
//!
//! What is asked for while a task reads gathers, and is read together with the next statement: to hand it to the thread of a
//! connection and to be handed its answer costs more than SQLite takes to find a row.
//!
//! The tasks have one fate: when one panics, the others end as well, their callers get an error at once, and the next caller
//! starts all of them again.

use std::sync::Arc;

use idem_core::{Record, RecordId, StoreError};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;

use crate::error::store_error;
use crate::queue::Queue;
use crate::row::{Found, load};

/// Two, so that whoever asks while a large answer is read finds somebody who has time.
const TASKS: usize = 2;

/// The most records in one statement: enough to share its costs, few enough that sixteen of the largest answers fit into memory,
/// and that the first is not kept waiting by the last.
const MAX_BATCH: usize = 16;

pub(crate) struct Question {
    id: RecordId,
    answer: oneshot::Sender<Result<Option<Record>, StoreError>>,
}

/// The way to the readers.
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

/// Runs the readers until there is nobody left to ask, or one of them panics: the others are aborted then.
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
    /// `None` before it is needed and after it failed.
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
            // Nothing is open on it.
            let _ = connection.close().await;
        }
    }

    async fn answer(&mut self, batch: &mut Vec<Question>) {
        // Whoever stopped waiting does not want it any more.
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
            // Whoever stopped waiting since will ask again.
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
