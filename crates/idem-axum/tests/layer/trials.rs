//! Trials of `idem-testkit`: handlers that keep their promise, and what a trial reports of those that do not.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{Method, Request, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use idem_axum::{
    HttpPolicy, Idempotency, IdempotencyContext, IdempotencyLayer, IdempotentTransaction, Settings, SingleTenant,
};
use idem_core::Timestamp;
use idem_core::engine::Contract;
use idem_core::memory::ManualClock;
use idem_testkit::{Broken, Faults, MemoryDatabase, MemoryTransaction, Trial, assert_idempotent};

type Transaction = IdempotentTransaction<MemoryTransaction<Vec<i64>>>;

/// What the processes of a service share.
#[derive(Clone)]
struct World {
    database: MemoryDatabase<Vec<i64>>,
    clock: Arc<ManualClock>,
    /// A system outside of the database, which has one effect for each of these keys.
    outside: Arc<Mutex<BTreeSet<String>>>,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(0)));
        Self { database: MemoryDatabase::with_clock(Vec::new(), clock.clone()), clock, outside: Arc::default() }
    }

    fn tell_outside(&self, key: String) {
        self.outside.lock().unwrap().insert(key);
    }

    /// Has another effect outside on every call.
    fn tell_outside_anew(&self) {
        let mut outside = self.outside.lock().unwrap();
        let number = outside.len();
        outside.insert(format!("number {number}"));
    }

    fn effects(&self) -> u64 {
        (self.database.data().len() + self.outside.lock().unwrap().len()) as u64
    }

    fn engine(&self, contract: Contract, faults: &Faults) -> Idempotency {
        let store = Arc::new(faults.wrap(Arc::new(self.database.clone())));
        match contract {
            Contract::Transactional => Idempotency::transactional(store, Settings::new()),
            Contract::AtMostOnce => Idempotency::at_most_once(store, Settings::new()),
            Contract::AtLeastOnce => Idempotency::at_least_once(store, Settings::new()),
        }
    }
}

fn pay(amount: i64) -> Request<Bytes> {
    let request = Request::builder().method(Method::POST).uri("/").header("content-type", "application/json");
    request.body(Bytes::from(amount.to_string())).unwrap()
}

/// A trial of the service that `app` makes of a layer.
fn trial(
    contract: Contract,
    app: impl Fn(World, IdempotencyLayer<SingleTenant>) -> Router + Send + Sync + 'static,
) -> Trial {
    let world = World::new();
    let start = {
        let world = world.clone();
        move |faults: Faults| {
            let layer = IdempotencyLayer::new(world.engine(contract, &faults)).single_tenant();
            std::future::ready(app(world.clone(), layer))
        }
    };
    let time = world.clock.clone();
    Trial::new(contract, start, || pay(1250), move || std::future::ready(world.effects()))
        .time(time)
        .refused(|| pay(-1))
}

/// Asserts what the trial reports, and a part of its message.
async fn is_broken(trial: Trial, expected: Broken, says: &str) {
    let broken = trial.check().await.unwrap_err();
    assert_eq!(broken, expected);
    assert!(broken.to_string().contains(says), "{broken}");
    let sentence = broken.to_string();
    let panicked = tokio::spawn(async move { assert_idempotent(&trial).await }).await.unwrap_err().into_panic();
    assert_eq!(panicked.downcast_ref::<String>(), Some(&sentence));
}

async fn into_the_transaction(mut payments: Transaction, Json(amount): Json<i64>) -> Response {
    payments.push(amount);
    if amount < 0 { StatusCode::UNPROCESSABLE_ENTITY.into_response() } else { format!("paid {amount}").into_response() }
}

#[tokio::test]
async fn handlers_that_keep_their_promise_pass() {
    let transactional = trial(Contract::Transactional, |_, layer| {
        Router::new().route("/", post(into_the_transaction).route_layer(layer))
    });
    assert_idempotent(&transactional).await;
    for contract in [Contract::AtLeastOnce, Contract::AtMostOnce] {
        let leased = trial(contract, |world, layer| {
            let handler = async move |IdempotencyContext(context): IdempotencyContext, Json(amount): Json<i64>| {
                if amount < 0 {
                    return Err(StatusCode::UNPROCESSABLE_ENTITY);
                }
                world.tell_outside(context.downstream_key("charge"));
                Ok("paid")
            };
            Router::new().route("/", post(handler).route_layer(layer))
        });
        assert_idempotent(&leased).await;
    }
}

#[tokio::test]
async fn a_route_without_the_layer_is_found() {
    let trial = trial(Contract::AtLeastOnce, |world, _| {
        Router::new().route("/", post(async move || world.tell_outside_anew()))
    });
    is_broken(trial, Broken::RepeatRan, "the layer is not on this route").await;
}

#[tokio::test]
async fn a_write_outside_of_the_transaction_is_found() {
    let trial = trial(Contract::Transactional, |world, layer| {
        let handler = async move |Json(amount): Json<i64>| {
            if amount < 0 {
                return StatusCode::UNPROCESSABLE_ENTITY;
            }
            world.tell_outside_anew();
            StatusCode::CREATED
        };
        Router::new().route("/", post(handler).route_layer(layer))
    });
    is_broken(trial, Broken::WroteOutside, "outside of its transaction").await;
}

#[tokio::test]
async fn an_effect_that_is_left_to_a_task_is_found() {
    let trial = trial(Contract::AtLeastOnce, |world, layer| {
        let handler = async move || {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(3_600)).await;
                world.tell_outside_anew();
            });
            StatusCode::ACCEPTED
        };
        Router::new().route("/", post(handler).route_layer(layer))
    });
    is_broken(trial, Broken::AnsweredTooEarly, "not in a task that goes on").await;
}

#[tokio::test]
async fn an_effect_without_a_downstream_key_is_found() {
    let trial = trial(Contract::AtLeastOnce, |world, layer| {
        let handler = async move |Json(amount): Json<i64>| {
            if amount < 0 {
                return StatusCode::UNPROCESSABLE_ENTITY;
            }
            world.tell_outside_anew();
            StatusCode::CREATED
        };
        Router::new().route("/", post(handler).route_layer(layer))
    });
    let expected = Broken::RanAgainAfterCrash { effects: 2, contract: Contract::AtLeastOnce };
    is_broken(trial, expected, "pass `Context::downstream_key` on").await;
}

#[tokio::test]
async fn an_answer_that_is_made_anew_outside_of_the_layer_is_found() {
    let trial = trial(Contract::Transactional, |_, layer| {
        let stamp = axum::middleware::map_response(async |response: Response| {
            let stamp = format!("{:?}", std::time::Instant::now());
            (response.status(), stamp)
        });
        Router::new().route("/", post(into_the_transaction).route_layer(layer)).layer(stamp)
    });
    let ok = StatusCode::OK;
    is_broken(trial, Broken::AnotherAnswer { first: ok, repeat: ok }, "outside of the layer").await;
}

#[tokio::test]
async fn a_refusal_that_leaves_its_effect_is_found() {
    let trial = trial(Contract::AtLeastOnce, |world, layer| {
        let handler = async move |IdempotencyContext(context): IdempotencyContext, Json(amount): Json<i64>| {
            world.tell_outside(context.downstream_key("charge"));
            if amount < 0 { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::CREATED }
        };
        Router::new().route("/", post(handler).route_layer(layer))
    });
    is_broken(trial, Broken::RefusedWithEffect(StatusCode::UNPROCESSABLE_ENTITY), "left its effect").await;
}

/// A handler without a layer: it checks for the key, works, and then stores the key.
#[tokio::test]
async fn a_check_before_the_act_is_found() {
    let trial = trial(Contract::AtLeastOnce, |world, _| {
        let handler = async move |request: axum::extract::Request| {
            let key = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
            let is_known = world.outside.lock().unwrap().iter().any(|known| known.starts_with(&key));
            if !is_known {
                tokio::time::sleep(Duration::from_millis(50)).await;
                let number = world.effects();
                world.tell_outside(format!("{key} {number}"));
            }
        };
        Router::new().route("/", post(handler))
    });
    is_broken(trial, Broken::RanAtOnce(8), "at once").await;
}

/// As with a unique constraint, which the second run meets.
#[tokio::test]
async fn a_rerun_that_fails_because_the_effect_is_there_is_found() {
    let trial = trial(Contract::AtLeastOnce, |world, layer| {
        let handler = async move |IdempotencyContext(context): IdempotencyContext, Json(amount): Json<i64>| {
            if amount < 0 {
                return StatusCode::UNPROCESSABLE_ENTITY;
            }
            let is_new = world.outside.lock().unwrap().insert(context.downstream_key("charge"));
            if is_new { StatusCode::CREATED } else { StatusCode::INTERNAL_SERVER_ERROR }
        };
        Router::new().route("/", post(handler).route_layer(layer))
    });
    let expected = Broken::FailedAfterCrash(StatusCode::INTERNAL_SERVER_ERROR);
    is_broken(trial, expected, "let the handler answer as the first time").await;
}

#[tokio::test]
async fn a_store_of_each_process_is_found() {
    let world = World::new();
    let start = {
        let world = world.clone();
        move |faults: Faults| {
            let alone = World { outside: Arc::clone(&world.outside), ..World::new() };
            let layer = IdempotencyLayer::new(alone.engine(Contract::AtLeastOnce, &faults)).single_tenant();
            let handler = async move |IdempotencyContext(context): IdempotencyContext| {
                alone.tell_outside(context.downstream_key("charge"));
            };
            std::future::ready(Router::new().route("/", post(handler).route_layer(layer)))
        }
    };
    let trial = Trial::new(Contract::AtLeastOnce, start, || pay(1250), move || std::future::ready(world.effects()));
    is_broken(trial, Broken::OtherProcessRan, "do not share one store").await;
}

/// An effect in middleware around the layer.
#[tokio::test]
async fn an_effect_after_the_record_is_found() {
    let trial = trial(Contract::AtLeastOnce, |world, layer| {
        let notify = move |response: Response| {
            let world = world.clone();
            async move {
                let is_first = !response.headers().contains_key("idempotency-replayed");
                if is_first && response.status().is_success() {
                    world.tell_outside_anew();
                }
                response
            }
        };
        let handler = async |Json(amount): Json<i64>| {
            if amount < 0 { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::CREATED }
        };
        let app = Router::new().route("/", post(handler).route_layer(layer));
        app.layer(axum::middleware::map_response(notify))
    });
    is_broken(trial, Broken::LostWithItsClient, "outside of the layer").await;
}

#[tokio::test]
async fn a_key_in_the_body_and_answers_without_a_body_can_be_tried() {
    let world = World::new();
    let start = {
        let world = world.clone();
        move |faults: Faults| {
            let pointer = "/id".parse().unwrap();
            let policy = HttpPolicy::new().key_member(pointer).key_only();
            let engine = world.engine(Contract::AtLeastOnce, &faults);
            let layer = IdempotencyLayer::new(engine).policy(policy).single_tenant();
            let world = world.clone();
            let handler = async move |IdempotencyContext(context): IdempotencyContext| {
                world.tell_outside(context.downstream_key("charge"));
                "charged"
            };
            std::future::ready(Router::new().route("/", post(handler).route_layer(layer)))
        }
    };
    let time = world.clock.clone();
    let trial = Trial::new(Contract::AtLeastOnce, start, || pay(1250), move || std::future::ready(world.effects()))
        .time(time)
        .put_key(|request, key| *request.body_mut() = Bytes::from(format!(r#"{{"id": "{key}"}}"#)))
        .body_is_not_kept();
    assert_idempotent(&trial).await;
}

#[tokio::test]
async fn mistakes_in_the_trial_itself_are_told() {
    let failing = trial(Contract::Transactional, |_, layer| {
        Router::new().route("/", post(async || StatusCode::FORBIDDEN).route_layer(layer))
    });
    is_broken(failing, Broken::FirstRequestFailed(StatusCode::FORBIDDEN), "give the trial one that succeeds").await;
    let twofold = trial(Contract::AtLeastOnce, |world, layer| {
        let handler = async move || {
            world.tell_outside_anew();
            world.tell_outside_anew();
        };
        Router::new().route("/", post(handler).route_layer(layer))
    });
    is_broken(twofold, Broken::ManyEffects(2), "count one for each operation").await;
    let unwrapped = trial(Contract::Transactional, |world, _| {
        let engine = world.engine(Contract::Transactional, &Faults::default());
        let layer = IdempotencyLayer::new(engine).single_tenant();
        Router::new().route("/", post(into_the_transaction).route_layer(layer))
    });
    is_broken(unwrapped, Broken::StoreNotWrapped, "`Faults::wrap`").await;
    let accepts = trial(Contract::AtLeastOnce, |world, layer| {
        let handler = async move |IdempotencyContext(context): IdempotencyContext| {
            world.tell_outside(context.downstream_key("charge"));
        };
        Router::new().route("/", post(handler).route_layer(layer))
    });
    is_broken(accepts, Broken::NotRefused(StatusCode::OK), "should refuse").await;
}
