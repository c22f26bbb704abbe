//! Yearly reports, which take longer than a client waits: the API answers 202, and a worker makes each report once.
//!
//! One process is both, unless `--role` says otherwise. Kill it anywhere and start it again.

mod reports;
mod store;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header, request::Parts};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use clap::{Parser, ValueEnum};
use futures_util::FutureExt as _;
use idem_axum::{HttpPolicy, IdempotencyContext, IdempotencyLayer};
use idem_core::engine::Settings;
use idem_jobs::{JobSettings, Jobs, Worker};
use reports::NewReport;
use store::Opened;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Makes yearly reports: POST /reports answers 202, GET /jobs/ID says how far it is.
#[derive(Debug, Clone, Parser)]
pub(crate) struct Config {
    /// sqlite://FILE, postgres://USER@HOST/DATABASE or redis://HOST.
    #[arg(long, default_value = "sqlite://reports.db")]
    store: String,
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: String,
    /// What this process does.
    #[arg(long, value_enum, default_value_t = Role::Both)]
    role: Role,
    /// Answer a repeated request with the report as soon as there is one, not with the first 202.
    #[arg(long)]
    final_answers: bool,
    /// The Postgres schema, and the start of the keys in Redis.
    #[arg(long, default_value = "reports")]
    schema: String,
    /// How long a crashed worker keeps its job, in milliseconds.
    #[arg(long, default_value_t = 30_000)]
    lease_ms: u64,
    /// How long after its request a report may still begin, in seconds.
    #[arg(long, default_value_t = 3600)]
    deadline_s: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    Both,
    Api,
    Worker,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let config = Config::parse();
    let lease = Duration::from_millis(config.lease_ms);
    let settings = Settings::new().lease(lease);
    let Opened { requests, jobs, queue, reports, purge } = store::open(&config, settings).await?;
    let job_settings = JobSettings::new()
        .start_deadline(Duration::from_secs(config.deadline_s))
        .visibility_timeout(lease)
        .queue_timeout(lease / 4)
        .poll_interval(lease / 30);
    let (engine, jobs) = (requests.clone(), Jobs::new(queue, jobs, job_settings)?);

    // The signal is caught before the program reports that it is ready.
    let mut stopped = signal(SignalKind::terminate())?;
    let (stop, stopping) = watch::channel(());
    let until_stop = |mut stopping: watch::Receiver<()>| async move { drop(stopping.changed().await) };
    let mut tasks = JoinSet::new();
    if let Some(store) = purge {
        tasks.spawn(store::purge(store, until_stop(stopping.clone())));
    }
    if config.role != Role::Api {
        let worker = Worker::new(jobs.clone()).handle("report", move |context, job| {
            let reports = reports.clone();
            async move { reports.make(&context, &job).await }
        });
        tasks.spawn(worker.run_until(until_stop(stopping.clone())).map(Ok));
    }
    if config.role != Role::Worker {
        let policy = HttpPolicy::new();
        let policy = if config.final_answers { policy.continued_by(Arc::new(jobs.clone())) } else { policy };
        let layer = IdempotencyLayer::new(requests).policy(policy).scope(tenant);
        let app = Router::new()
            .route("/reports", post(ask).route_layer(layer))
            .route("/jobs/{id}", get(show))
            .with_state(jobs);
        let listener = TcpListener::bind(&config.listen).await?;
        println!("listening on http://{}", listener.local_addr()?);
        tasks.spawn(axum::serve(listener, app).with_graceful_shutdown(until_stop(stopping)).into_future());
    } else {
        println!("working");
    }
    tokio::select! {
        _ = stopped.recv() => {}
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        // None of them ends by itself.
        Some(ended) = tasks.join_next() => ended??,
    }
    drop(stop);
    match tokio::time::timeout(Duration::from_secs(20), tasks.join_all()).await {
        Ok(ended) => ended.into_iter().collect::<Result<(), _>>()?,
        Err(_) => tracing::warn!("a job still runs; it is delivered again unless the engine settles it in time"),
    }
    engine.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}

/// The tenant is the bearer token. A real service looks up the account of the token.
fn tenant(head: &Parts) -> Option<String> {
    tenant_of(&head.headers)
}

fn tenant_of(headers: &HeaderMap) -> Option<String> {
    let token = headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")?;
    (!token.is_empty()).then(|| token.to_owned())
}

/// POST /reports: the job is enqueued in the transaction that settles the request.
async fn ask(
    State(jobs): State<Jobs>,
    IdempotencyContext(request): IdempotencyContext,
    axum::Json(report): axum::Json<NewReport>,
) -> Response {
    if !report.is_valid() {
        return (StatusCode::UNPROCESSABLE_ENTITY, "a year has four digits").into_response();
    }
    match jobs.enqueue(&request, "report", &report).await {
        Ok(accepted) => accepted.into_http().into_response(),
        Err(error) => {
            tracing::error!(error = &error as &dyn Error, "a job was not enqueued");
            let is_retryable = error.is_retryable();
            if is_retryable { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::INTERNAL_SERVER_ERROR }
                .into_response()
        }
    }
}

/// GET /jobs/ID.
async fn show(State(jobs): State<Jobs>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    match tenant_of(&headers) {
        Some(tenant) => jobs.status(Some(&tenant), &id).await.into_response(),
        None => StatusCode::UNAUTHORIZED.into_response(),
    }
}
