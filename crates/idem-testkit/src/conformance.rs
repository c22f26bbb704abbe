//! The conformance suite as tests: one for every case of [`cases`](crate::cases).

use std::time::Duration;

use crate::subject::{Case, Subject};

/// The time limit of a case. No case takes seconds on any store, so one that takes this long never ends.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Runs one case on a subject that `harness` makes, on a separate runtime with several threads.
///
/// # Panics
/// When the store breaks its contract, or the case takes longer than two minutes.
pub fn run<H, S>(harness: H, case: Case)
where
    H: FnOnce() -> S,
    S: Future<Output = Subject>,
{
    within_the_limit(async {
        let subject = harness().await;
        case(&subject).await;
    });
}

/// Runs a case on a new runtime, within the time limit.
pub(crate) fn within_the_limit(case: impl Future<Output = ()>) {
    let limited = async { tokio::time::timeout(TIMEOUT, case).await };
    runtime().block_on(limited).expect("the case did not end within two minutes");
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(4).enable_all().build().expect("a runtime starts")
}

/// Makes a `#[test]` of every conformance case, for the store that the harness gives.
///
/// `conformance!(harness)` or `conformance!(module_name, harness)`, where `harness` can be called without arguments and
/// gives a future of a [`Subject`](crate::Subject). It is called once for every test.
#[macro_export]
macro_rules! conformance {
    ($harness:expr) => {
        $crate::conformance!(conformance, $harness);
    };
    ($module:ident, $harness:expr) => {
        #[cfg(test)]
        mod $module {
            use super::*;
            $crate::__for_every_case!($crate::__test_of_every_case, ($harness));
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __test_of_every_case {
    (($harness:expr), $($case:ident)+) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::run($harness, |subject| ::std::boxed::Box::pin($crate::cases::$case(subject)));
            }
        )+
    };
}
