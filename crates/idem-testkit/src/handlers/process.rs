//! A process of the service under test.

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tower_service::Service;

use crate::faults::Faults;

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The whole answer, or why there is none.
pub(super) type Answered = Result<Response<Bytes>, String>;

/// A service with its types erased: it gets a request and answers with a whole body.
pub(super) type Call = Arc<dyn Fn(Request<Bytes>) -> Boxed<Answered> + Send + Sync>;

/// Makes the service of a new process.
pub(super) type Start = Arc<dyn Fn(Faults) -> Boxed<Call> + Send + Sync>;

pub(super) fn call_of<S, R>(service: S) -> Call
where
    S: Service<Request<Full<Bytes>>, Response = Response<R>> + Clone + Send + 'static,
    S::Error: Debug,
    S::Future: Send,
    R: http_body::Body + Send,
    R::Data: Send,
    R::Error: Debug,
{
    // Services need not be `Sync`.
    let service = Mutex::new(service);
    Arc::new(move |request: Request<Bytes>| {
        let mut service = service.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Box::pin(async move {
            let told = |what: &str, error: &dyn Debug| format!("{what}: {error:?}");
            std::future::poll_fn(|context| service.poll_ready(context))
                .await
                .map_err(|error| told("not ready", &error))?;
            let answered = service.call(request.map(Full::from)).await.map_err(|error| told("no response", &error))?;
            let (head, body) = answered.into_parts();
            let body = body.collect().await.map_err(|error| told("no whole body", &error))?.to_bytes();
            Ok(Response::from_parts(head, body))
        })
    })
}

/// A service on a separate runtime, which can be ended at any moment, as a process can.
pub(super) struct Process {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    call: Call,
    pub(super) faults: Faults,
}

impl Process {
    pub(super) async fn start(start: &Start) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime for the service");
        let faults = Faults::default();
        let call = runtime.spawn(start(faults.clone())).await.expect("the service starts");
        Self { runtime: Some(runtime), call, faults }
    }

    /// Sends a request. Aborting the task acts like a client that disconnects.
    pub(super) fn send(&self, request: Request<Bytes>) -> JoinHandle<Answered> {
        let runtime = self.runtime.as_ref().expect("it is not dropped yet");
        runtime.spawn((self.call)(request))
    }
}

/// Ends it like a crash: its tasks stop, and what they hold is dropped.
impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
