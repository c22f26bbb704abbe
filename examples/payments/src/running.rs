//! The stages of each tenant's requests, for tests that wait for them and hold them.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use tokio::sync::Notify;

use crate::problem::Problem;

/// The requests that are under way, by tenant.
#[derive(Debug, Clone, Default)]
pub(crate) struct Running(Arc<Mutex<HashMap<String, Tenant>>>);

#[derive(Debug, Default)]
struct Tenant {
    stages: Stages,
    release: Arc<Notify>,
    time_out: Arc<Notify>,
}

/// How many requests and runs of a tenant are at each stage. A request is counted while the server has it. Its run may
/// outlive it, so it is counted separately.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Stages {
    /// Requests that the server has, and has not begun to answer.
    open: u32,
    /// Runs before their effect.
    before: u32,
    /// Runs after it.
    after: u32,
    /// Answers whose body is still made.
    sending: u32,
}

/// The stage of a request, of a run, or of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Open,
    Before,
    After,
    Sending,
}

/// Counts something at its stage until it is dropped.
#[derive(Debug)]
pub(crate) struct Stay {
    running: Running,
    tenant: String,
    stage: Stage,
}

impl Stages {
    fn at(&mut self, stage: Stage) -> &mut u32 {
        match stage {
            Stage::Open => &mut self.open,
            Stage::Before => &mut self.before,
            Stage::After => &mut self.after,
            Stage::Sending => &mut self.sending,
        }
    }
}

impl Running {
    pub(crate) fn stages(&self, tenant: &str) -> Stages {
        self.lock().get(tenant).map(|tenant| tenant.stages).unwrap_or_default()
    }

    /// Releases something that is held for the tenant, or the next thing that would be.
    pub(crate) fn release(&self, tenant: &str) {
        if let Some(tenant) = self.lock().get(tenant) {
            tenant.release.notify_one();
        }
    }

    /// Ends a timeout of the tenant.
    pub(crate) fn time_out(&self, tenant: &str) {
        if let Some(tenant) = self.lock().get(tenant) {
            tenant.time_out.notify_one();
        }
    }

    /// Runs `future` under a timeout that a test ends.
    pub(crate) async fn until_time_out<T>(&self, tenant: &str, future: impl Future<Output = T>) -> Result<T, Problem> {
        let Some(time_out) = self.lock().get(tenant).map(|tenant| Arc::clone(&tenant.time_out)) else {
            return Ok(future.await);
        };
        tokio::select! {
            value = future => Ok(value),
            () = time_out.notified() => Err(Problem::TimedOut),
        }
    }

    pub(crate) fn enter(&self, tenant: &str, stage: Stage) -> Stay {
        self.change(tenant, |stages| *stages.at(stage) += 1);
        Stay { running: self.clone(), tenant: tenant.to_owned(), stage }
    }

    fn change(&self, tenant: &str, change: impl FnOnce(&mut Stages)) {
        let mut running = self.lock();
        let entry = running.entry(tenant.to_owned()).or_default();
        change(&mut entry.stages);
        if entry.stages == Stages::default() {
            running.remove(tenant);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Tenant>> {
        // Every change is one step on one entry, so a panic leaves the map whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stay {
    /// Waits until a test releases it.
    pub(crate) async fn released(&self) {
        let release = self.running.lock().get(&self.tenant).map(|tenant| Arc::clone(&tenant.release));
        if let Some(release) = release {
            release.notified().await;
        }
    }

    /// Runs `future` under a timeout that a test ends.
    pub(crate) async fn until_time_out<T>(&self, future: impl Future<Output = T>) -> Result<T, Problem> {
        self.running.until_time_out(&self.tenant, future).await
    }

    pub(crate) fn has_effect(&mut self) {
        let from = std::mem::replace(&mut self.stage, Stage::After);
        self.running.change(&self.tenant, |stages| {
            *stages.at(Stage::After) += 1;
            *stages.at(from) -= 1;
        });
    }

    /// Another stay of the tenant, while the body of its answer is made.
    pub(crate) fn sending(&self) -> Self {
        self.running.enter(&self.tenant, Stage::Sending)
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.running.change(&self.tenant, |stages| *stages.at(self.stage) -= 1);
    }
}
