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
    #[error(
        "a repeat ran the operation again: the layer is not on this route, the key does not reach it, or the answer says \
         `do_not_store`"
    )]
    RepeatRan,
    /// A repeat to another process ran.
    #[error("a repeat to another process ran the operation again: the processes do not share one store")]
    OtherProcessRan,
    /// The answer of a repeat differs.
    #[error(
        "a repeat got {repeat}, the first request {first}, or their bodies differ: something outside of the layer changes \
         the answer, or the body is not kept (`Trial::body_is_not_kept`)"
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
    #[error("a client disconnected, and its repeat had another effect: the effect is made outside of the layer")]
    RanAfterDisconnect,
    /// The effect of a request whose client had gone never came.
    #[error("a client disconnected, and the effect never came: it is made outside of the layer, after the answer")]
    LostWithItsClient,
    /// The store of the service is not the one of the trial.
    #[error("the service never asked its store: wrap the store with `Faults::wrap`, and hand that to the layer")]
    StoreNotWrapped,
    /// The effect does not wait for the commit.
    #[error("the effect was there before the commit: the handler writes outside of its transaction")]
    WroteOutside,
    /// The record is committed before the effect.
    #[error(
        "a process crashed after the record, and the effect never came: it is made after the handler, outside of the layer"
    )]
    EffectAfterRecord,
    /// The repeat after a crash had another effect.
    #[error("the repeat after a crash made {effects} effects in all: {}", advice(*.contract))]
    RanAgainAfterCrash {
        /// How many effects there were in the end.
        effects: u64,
        /// What the trial expects of the service.
        contract: Contract,
    },
    /// The repeat after a crash did not run.
    #[error(
        "the repeat after a crash was answered with {status} and had no effect, although the contract is {contract:?}: the layer has \
         another contract, or a probe is wrong"
    )]
    NotRunAfterCrash {
        /// What the trial expects of the service.
        contract: Contract,
        /// The repeat's answer.
        status: StatusCode,
    },
    /// The effect is there, and the client hears that it failed.
    #[error(
        "the repeat after a crash was answered with {0}, although the effect is there: let the handler answer as the first time \
         when it finds its effect done"
    )]
    FailedAfterCrash(StatusCode),
    /// There is no effect, and the client hears that it succeeded.
    #[error("the repeat after a crash was answered with {0}, although there is no effect: the probe is wrong")]
    SucceededWithoutEffect(StatusCode),
    /// Nothing frees the key of a request that was not answered.
    #[error(
        "the repeat of a request that got no answer was refused with {0} for as long as it was sent: the key is stuck, or \
         `Trial::lease` is shorter than the engine's"
    )]
    Stuck(StatusCode),
    /// A request that should be refused was not.
    #[error("the request that the handler should refuse was answered with {0}")]
    NotRefused(StatusCode),
    /// A request that failed left an effect.
    #[error("a request that was answered with {0} left its effect: the handler keeps what it wrote before it failed")]
    RefusedWithEffect(StatusCode),
}

fn advice(contract: Contract) -> &'static str {
    match contract {
        Contract::Transactional => "the handler writes outside of its transaction",
        Contract::AtLeastOnce => {
            "the handler runs again, so pass `Context::downstream_key` on, and count effects with the same key once"
        }
        Contract::AtMostOnce => "the layer has another contract, or a probe is wrong",
    }
}
