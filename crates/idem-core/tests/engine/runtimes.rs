//! Where operations run.

use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Idempotency};
use tokio::runtime;
use tokio::sync::Semaphore;

use crate::support::{World, done, operation, panicked};

#[test]
fn an_operation_outlives_the_runtime_of_whoever_asked_on_the_one_that_the_settings_name() {
    let world = World::new();
    let home = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let engine = Idempotency::at_most_once(world.store.clone(), world.settings().runtime(home.handle().clone()));
    let (started, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let asker = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    asker.block_on(async {
        let (began, opened) = (Arc::clone(&started), Arc::clone(&gate));
        let run = move |_: Context| async move {
            began.add_permits(1);
            opened.acquire().await.unwrap().forget();
            Conclusion { value: "ran", disposition: done(), retention: None }
        };
        let engine = engine.clone();
        tokio::spawn(async move { engine.execute(operation(), run, panicked).await });
        started.acquire().await.unwrap().forget();
    });
    drop(asker);
    gate.add_permits(1);
    let waiting = operation().wait(Duration::from_secs(20));
    let again = home.block_on(world.run_as(&engine, waiting, Duration::ZERO, done()));
    assert!(matches!(again.unwrap(), Answer::Replay(_)));
    assert_eq!(world.runs(), 0, "it did not run again");
}
