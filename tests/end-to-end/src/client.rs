//! A client process. It pays through its journal, resumes what it finds there, and lists what its callers wanted and saw.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures_util::{StreamExt as _, stream};
use idem_client::{
    Backoff, Journal, JournalConfig, JournalError, Operation, PendingOperation, Profile, RetryPolicy, Settings, client,
};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest_middleware::ClientWithMiddleware;
use tokio::time::sleep;
use uuid::Uuid;

use crate::AnyError;
use crate::service::NewPayment;

/// How many operations a process sends at once, and as many again that it resumes.
const CONCURRENCY: usize = 16;

/// A caller pauses before each operation for this long times a random byte.
const PAUSE: Duration = Duration::from_millis(2);

/// How long one attempt and one operation may take: so short that faults leave many operations to be resumed.
const ATTEMPT: Duration = Duration::from_secs(4);
const DEADLINE: Duration = Duration::from_secs(8);

#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    /// Whose operations they are: the bearer token, and the label in the journal.
    #[arg(long, default_value = "")]
    tenant: String,
    /// The URLs of the services.
    #[arg(long)]
    service: Vec<String>,
    /// The journal, which other clients may use too.
    #[arg(long, default_value = "client.journal")]
    journal: PathBuf,
    /// The file to which this process adds a line for each intent and each answer.
    #[arg(long, default_value = "client.list")]
    list: PathBuf,
    /// Begin nothing new, and end when the journal has an answer to every operation.
    #[arg(long)]
    finish: bool,
}

struct Payer {
    options: Options,
    client: ClientWithMiddleware,
    journal: Journal,
    list: File,
}

pub(crate) async fn run(options: &Options) -> Result<(), AnyError> {
    // The checker reads all of them.
    let journal = JournalConfig::new(&options.journal).keep_bytes(1 << 40);
    let journal = Journal::open(journal).await?;
    let settings = Settings::of(RetryPolicy::new(Profile::Idem).poll(true));
    let backoff = Backoff { base: Duration::from_millis(20), cap: Duration::from_millis(500) };
    let settings = settings.attempt_timeout(ATTEMPT).deadline(DEADLINE).backoff(backoff).retry_budget(100, 1.0);
    let client = client(settings.journal(journal.clone()), reqwest::Client::builder())?.build();
    let list = File::options().create(true).append(true).open(&options.list)?;
    let payer = Arc::new(Payer { options: options.clone(), client, journal, list });
    // The last line of a process that was killed may have no end.
    payer.note("")?;
    println!("paying");
    if options.finish {
        while payer.resume_all().await? > 0 {
            sleep(Duration::from_millis(100)).await;
        }
        return Ok(());
    }
    for _ in 0..CONCURRENCY {
        let payer = Arc::clone(&payer);
        tokio::spawn(async move { payer.pay_on().await });
    }
    loop {
        sleep(Duration::from_secs(1)).await;
        if let Err(error) = payer.resume_all().await {
            tracing::warn!(error = &error as &dyn std::error::Error, "the journal could not be read");
        }
    }
}

impl Payer {
    /// One payment after the other.
    async fn pay_on(&self) -> Result<(), std::io::Error> {
        loop {
            let id = Uuid::new_v4();
            let [way, amount, pause, ..] = *id.as_bytes();
            sleep(PAUSE * u32::from(pause)).await;
            self.note(&format!("intent {id}"))?;
            let service = &self.options.service[usize::from(way) % self.options.service.len()];
            // One operation in four is answered 202 first.
            let path = if way < 64 { "later" } else { "payments" };
            let new = NewPayment { operation: id.to_string(), amount: amount.into() };
            let request = self
                .client
                .post(format!("{service}/{path}"))
                .bearer_auth(&self.options.tenant)
                .header(CONTENT_TYPE, "application/json")
                .body(serde_json::to_vec(&new)?)
                .with_extension(Operation::new().label(&self.options.tenant));
            match request.send().await {
                Ok(answer) => self.note_answer("answered", answer).await?,
                Err(error) => tracing::info!(%id, error = &error as &dyn std::error::Error, "no answer yet"),
            }
        }
    }

    /// Resumes the operations that no process sends. Returns how many had no answer before.
    async fn resume_all(&self) -> Result<usize, JournalError> {
        let pending = self.journal.pending().await?;
        let idle = pending.iter().filter(|operation| !operation.is_running);
        stream::iter(idle).for_each_concurrent(CONCURRENCY, |operation| self.resume(operation)).await;
        Ok(pending.len())
    }

    async fn resume(&self, operation: &PendingOperation) {
        let token = format!("Bearer {}", operation.label.as_deref().unwrap_or_default());
        let Ok(token) = HeaderValue::try_from(token) else { return };
        let credentials = |request: &mut reqwest::Request| drop(request.headers_mut().insert(AUTHORIZATION, token));
        let resumed = match self.journal.resume(&operation.id, &self.client, credentials).await {
            Ok(answer) => self.note_answer("resumed", answer).await,
            Err(error) => {
                tracing::info!(?operation, error = &error as &dyn std::error::Error, "not resumed");
                Ok(())
            }
        };
        if let Err(error) = resumed {
            tracing::error!(error = &error as &dyn std::error::Error, "the list could not be written");
        }
    }

    async fn note_answer(&self, how: &str, answer: reqwest::Response) -> Result<(), std::io::Error> {
        let status = answer.status().as_u16();
        // The answer was read before, so that it is here as a whole.
        let body = answer.text().await.map_err(std::io::Error::other)?;
        self.note(&format!("{how} {status} {body}"))
    }

    /// Adds a line by one write, as other tasks write too.
    fn note(&self, line: &str) -> Result<(), std::io::Error> {
        (&self.list).write_all(format!("{line}\n").as_bytes())
    }
}
