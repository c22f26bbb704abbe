//! Runs the handler in a separate task on its worker. Requests and responses of actix stay on the worker's thread, while the
//! engine runs on its runtime. The handler waits for its context from the engine, and sends back how it ended.

use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use actix_web::body::{BodySize, MessageBody};
use actix_web::dev::{Service, ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderName, RETRY_AFTER};
use actix_web::{Error, HttpMessage, HttpRequest, HttpResponse, rt};
use idem_core::engine::{Conclusion, Context};
use idem_http::{
    BrokenResponse, Captured, HttpPolicy, RETENTION_HEADER, Reply, Reservation, ResponseDirectives, StatedRetention,
    never_began,
};
use tokio::sync::oneshot;
use tracing::{Instrument as _, Span};

use crate::convert::{Data, Fields, respond, sendable};
use crate::failure::Failure;

/// What the engine runs: it starts the handler, and awaits its end.
type Running = Pin<Box<dyn Future<Output = Result<Conclusion<()>, BrokenResponse>> + Send>>;

/// What a handler leaves on the worker when it has ended, or was not started.
pub(crate) enum Handled {
    /// The request, and the response unless that broke off.
    Answered(HttpRequest, Option<HttpResponse>),
    /// The service failed, or the handler panicked, and no request is left. Holds the reason, and the response with a copy of it.
    Failed(String, Option<(HttpResponse, Reply)>),
}

/// Puts the handler into a separate task, which a client's disconnect does not cancel. The handler starts when the engine
/// runs the returned closure. If the engine drops the closure, the handler never starts.
pub(crate) fn prepare<I, B>(
    inner: Rc<I>,
    policy: &Arc<HttpPolicy>,
    stated: StatedRetention,
    request: ServiceRequest,
    reservation: Reservation,
) -> (impl FnOnce(Context) -> Running + Send + 'static, impl Future<Output = Handled>)
where
    I: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    let (start, started) = oneshot::channel::<(Context, Span)>();
    let (end, ended) = oneshot::channel();
    let policy = Arc::clone(policy);
    let task = rt::spawn(async move {
        let Ok((context, span)) = started.await else {
            return Handled::Answered(request.into_parts().0, None);
        };
        // The engine has checked the lease on its own thread, but this worker may have been busy since then.
        if context.is_lease_lost() {
            // If the engine is gone, it settles nothing.
            let _ = end.send(Ok(never_began(())));
            return Handled::Answered(request.into_parts().0, None);
        }
        let is_protected = context.is_protected();
        request.extensions_mut().insert::<Context>(context);
        let answering = async {
            let answered = inner.call(request).await;
            // The handler has read the body.
            drop(reservation);
            conclude(&policy, stated, is_protected, answered).await
        };
        // A new task is in no span.
        let (handled, conclusion) = answering.instrument(span).await;
        // If the engine is gone, it settles nothing, and does not log.
        if let Err(Err(error)) = end.send(conclusion) {
            tracing::warn!(error = &error as &dyn std::error::Error, "a response counts as a failure of its handler");
        }
        handled
    });
    let run = move |context| -> Running {
        Box::pin(async move {
            if start.send((context, Span::current())).is_err() {
                // The worker ended before the handler began.
                return Ok(never_began(()));
            }
            match ended.await {
                Ok(conclusion) => conclusion,
                // The handler panicked, or its worker ended. Either way, how far it came is unknown.
                Err(gone) => resume_unwind(Box::new(gone)),
            }
        })
    };
    (run, async { task.await.unwrap_or_else(|_| Handled::Failed("the handler panicked".to_owned(), None)) })
}

/// Reads the response until it can be settled, and puts together what the client gets.
async fn conclude<B: MessageBody + 'static>(
    policy: &HttpPolicy,
    stated: StatedRetention,
    is_protected: bool,
    answered: Result<ServiceResponse<B>, Error>,
) -> (Handled, Result<Conclusion<()>, BrokenResponse>) {
    let (request, response) = match answered {
        Ok(response) => {
            let (request, response) = response.into_parts();
            (Ok(request), response.map_into_boxed_body())
        }
        // The error makes its own response, as in actix: `HttpResponse::from_error` leaves out what middlewares have added to it.
        Err(error) => (Err(error.to_string()), error.error_response()),
    };
    let (mut head, mut body) = response.into_parts();
    let whole = body.size();
    let directives = head.extensions().get::<ResponseDirectives>().cloned();
    let status = head.status().as_u16();
    let capture = policy.capture(status, &Fields(head.headers()), directives.as_ref());
    // Actix sends the header `Content-Length` of a handler only for a stream that is not chunked.
    let capture = match whole {
        BodySize::Sized(bytes) => capture.expect_bytes(Some(bytes)),
        BodySize::None => capture.expect_bytes(Some(0)),
        BodySize::Stream if head.head().chunked() => capture.expect_bytes(None),
        BodySize::Stream => capture,
    };
    if let Some(seconds) = capture.retry_after_s()
        && !head.headers().contains_key(RETRY_AFTER)
    {
        head.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    let (Conclusion { value: chunks, disposition, retention }, captured) = match capture.read(Data(&mut body)).await {
        Ok(read) => read,
        Err(error) => return (Handled::of(request, None, None), Err(error)),
    };
    head.headers_mut().remove(policy.replay_header_name());
    head.headers_mut().remove(RETENTION_HEADER);
    if let Some(seconds) = stated.seconds(is_protected, &disposition, retention) {
        head.headers_mut().insert(HeaderName::from_static(RETENTION_HEADER), seconds.into());
    }
    let copy = request.is_err().then(|| policy.copy_of(status, &Fields(head.headers()), &chunks, captured));
    let rest = (captured == Captured::Enough).then_some(body);
    let response = head.set_body(sendable(chunks, whole, rest));
    (Handled::of(request, Some(response), copy), Ok(Conclusion { value: (), disposition, retention }))
}

impl Handled {
    fn of(request: Result<HttpRequest, String>, response: Option<HttpResponse>, copy: Option<Reply>) -> Self {
        match request {
            Ok(request) => Self::Answered(request, response),
            Err(reason) => Self::Failed(reason, response.zip(copy)),
        }
    }

    /// What the client gets.
    pub(crate) fn answer(self, outcome: Result<(), Reply>, policy: &HttpPolicy) -> Result<ServiceResponse, Error> {
        match self {
            Self::Answered(request, response) => {
                let response = policy.answer_of(outcome, response).unwrap_or_else(respond);
                Ok(ServiceResponse::new(request, response))
            }
            Self::Failed(reason, answer) => {
                let answer = policy.answer_of(outcome, answer);
                let (first, again) = answer.unwrap_or_else(|reply| (respond(reply.clone()), reply));
                // Actix has no other way to answer without the request.
                Err(Failure::new(reason, first, again).into())
            }
        }
    }
}
