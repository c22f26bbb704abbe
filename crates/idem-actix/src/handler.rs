//! The handler's own task. Requests and responses of actix stay on the thread of their worker, while the engine runs
//! where it was told to: the handler waits there for its context, and sends back how it ended.

use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use actix_web::body::MessageBody;
use actix_web::dev::{Service, ServiceRequest, ServiceResponse};
use actix_web::error::InternalError;
use actix_web::{Error, HttpMessage, HttpRequest, HttpResponse, rt};
use idem_core::Writes;
use idem_core::engine::{Conclusion, Context, Disposition, ExecuteError};
use idem_http::{Captured, HttpPolicy, Reply, Reservation, ResponseDirectives};
use tokio::sync::oneshot;

use crate::convert::{Data, Fields, respond, sendable};

/// What the engine runs: it starts the handler, and awaits its end.
type Running = Pin<Box<dyn Future<Output = Option<Conclusion<()>>> + Send>>;

/// What is left on the worker when a handler has ended, or was not started.
#[derive(Default)]
pub(crate) struct Handled {
    /// None is left after a panic, nor by a service that failed.
    request: Option<HttpRequest>,
    /// What the handler answered.
    response: Option<HttpResponse>,
    /// Why the service failed.
    error: Option<String>,
}

/// Puts the handler into a task of its own, which a client that goes away does not cancel. It starts when the engine
/// runs what is returned first, and is gone without it.
pub(crate) fn prepare<I, B>(
    inner: Rc<I>,
    policy: &Arc<HttpPolicy>,
    request: ServiceRequest,
    reservation: Reservation,
) -> (impl FnOnce(Context) -> Running + Send + 'static, impl Future<Output = Handled>)
where
    I: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    let (start, started) = oneshot::channel();
    let (end, ended) = oneshot::channel();
    let policy = Arc::clone(policy);
    let task = rt::spawn(async move {
        let Ok(context) = started.await else {
            return Handled { request: Some(request.into_parts().0), ..Handled::default() };
        };
        request.extensions_mut().insert::<Context>(context);
        let answered = inner.call(request).await;
        // The handler has had the body.
        drop(reservation);
        let (handled, conclusion) = conclude(&policy, answered).await;
        // An engine that has gone settles nothing.
        let _ = end.send(conclusion);
        handled
    });
    let run = move |context| -> Running {
        Box::pin(async move {
            if start.send(context).is_err() {
                // Its worker has ended before it: the handler did not begin.
                let disposition = Disposition::Release { writes: Writes::Discard };
                return Some(Conclusion { value: (), disposition, retention: None });
            }
            match ended.await {
                Ok(conclusion) => conclusion,
                // It panicked, or its worker ended, which is no different: nobody knows how far it came.
                Err(gone) => resume_unwind(Box::new(gone)),
            }
        })
    };
    (run, async { task.await.unwrap_or_default() })
}

/// Reads the response until it can be settled, and puts together what the client gets.
async fn conclude<B: MessageBody + 'static>(
    policy: &HttpPolicy,
    answered: Result<ServiceResponse<B>, Error>,
) -> (Handled, Option<Conclusion<()>>) {
    let (request, response, error) = match answered {
        Ok(response) => {
            let (request, response) = response.into_parts();
            (Some(request), response.map_into_boxed_body(), None)
        }
        Err(error) => {
            let reason = error.to_string();
            (None, HttpResponse::from_error(error), Some(reason))
        }
    };
    let (head, mut body) = response.into_parts();
    let whole = body.size();
    let directives = head.extensions().get::<ResponseDirectives>().cloned();
    let capture = policy.capture(head.status().as_u16(), &Fields(head.headers()), directives.as_ref());
    let Some((Conclusion { value: chunks, disposition, retention }, captured)) = capture.read(Data(&mut body)).await
    else {
        return (Handled { request, response: None, error }, None);
    };
    let rest = (captured == Captured::Enough).then_some(body);
    let response = Some(head.set_body(sendable(chunks, whole, rest)));
    (Handled { request, response, error }, Some(Conclusion { value: (), disposition, retention }))
}

impl Handled {
    /// What the client gets.
    pub(crate) fn answer(self, outcome: Result<(), Reply>, policy: &HttpPolicy) -> Result<ServiceResponse, Error> {
        let response = match (outcome, self.response) {
            (Ok(()), Some(response)) => response,
            (Ok(()), None) => respond(policy.failure(&ExecuteError::Interrupted)),
            (Err(reply), _) => respond(reply),
        };
        match self.request {
            Some(request) => Ok(ServiceResponse::new(request, response)),
            // Actix has no other way to answer without the request.
            None => {
                let reason = self.error.unwrap_or_else(|| "the handler panicked".to_owned());
                Err(InternalError::from_response(reason, response).into())
            }
        }
    }
}
