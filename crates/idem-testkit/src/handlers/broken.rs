//! What is wrong with a handler.

use http::StatusCode;
use idem_core::engine::Contract;
use thiserror::Error;

/// The promise that a handler breaks, and what to look at.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Broken {
    /// The trial needs a request that succeeds.
    #[error("the first request was answered with {0}; give the trial one that succeeds")]
    FirstRequestFailed(StatusCode),
    /// The service did not answer.
    #[error("the service did not answer: {0}")]
    NoAnswer(String),
    /// The effect is not there when the answer is.
    #[error("the request was answered before its effect was there: do it in the handler, not in a task that goes on")]
    AnsweredTooEarly,
    /// One request has several effects.
    #[error("one request had {0} effects: let `effects` count one for each operation")]
    ManyEffects(u64),
    /// A repeat ran.
    #[error("a repeat ran the operation again: the layer is not on this route, or the key does not reach it")]
    RepeatRan,
    /// The answer of a repeat differs.
    #[error(
        "a repeat got {repeat}, the first request {first}, or their bodies differ: something outside of the layer changes \
         the answer, or it is not kept"
    )]
    AnotherAnswer {
        /// The status of the first answer.
        first: StatusCode,
        /// The status of the repeat's.
        repeat: StatusCode,
    },
    /// Requests at once ran more than once.
    #[error("{0} requests with one key at once had more than one effect: the layer is not on this route")]
    RanAtOnce(usize),
    /// The repeat of a request whose client had gone had another effect.
    #[error("a client disconnected, and its repeat had another effect: the handler leaves the effect to a task")]
    RanAfterDisconnect,
    /// The store of the service is not the one of the trial.
    #[error("the service never asked its store: wrap the store with `Faults::wrap`, and hand that to the layer")]
    StoreNotWrapped,
    /// The effect does not wait for the commit.
    #[error("the effect was there before the commit: the handler writes outside of its transaction")]
    WroteOutside,
    /// A crash between the effect and its record.
    #[error("after a crash between effect and answer the repeat had {effects} effects in all: {}", advice(*.contract))]
    AfterCrash {
        /// How many effects there were in the end.
        effects: u64,
        /// What the service promises.
        contract: Contract,
    },
    /// Nothing frees the key of a request that was not answered.
    #[error(
        "the repeat of a request that got no answer was refused with {0} for as long as it was sent: the key is stuck"
    )]
    Stuck(StatusCode),
    /// A request that failed left an effect.
    #[error("a request that was answered with {0} left its effect: the handler keeps what it wrote before it failed")]
    RefusedWithEffect(StatusCode),
}

fn advice(contract: Contract) -> &'static str {
    match contract {
        Contract::Transactional => "the handler writes outside of its transaction",
        Contract::AtLeastOnce => {
            "it runs again, so pass `Context::downstream_key` on, and count effects with the same key once"
        }
        Contract::AtMostOnce => "the handler leaves the effect to a task, or another process runs it without the layer",
    }
}
