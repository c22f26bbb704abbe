//! The conformance cases of [`Inspect`], for subjects that are [`inspected_by`](Subject::inspected_by) a store.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    Acquire, Inspect, Origin, OwnerToken, RecordCounts, RecordFilter, RecordId, RecordState, RecordSummary, Resolution,
    Resolve, ResolveOutcome, Scope, Settlement, StateName, StoreErrorKind, StoredBody, StoredResponse, Takeover,
    TraceParent,
};

use crate::cases::assert_time;
use crate::fixture::{BACKOFF, KEPT, LEASE, checkpoint, completed, failed, repeat_of, request, response, retryable};
use crate::subject::Subject;

/// The list of these cases.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_every_inspecting_case {
    ($callback:path, $argument:tt) => {
        $callback! { $argument,
            nothing_is_listed_of_an_empty_store
            a_record_is_shown_as_it_is
            a_listing_has_each_record_once
            a_listing_says_what_a_record_says
            records_are_selected_by_state_age_and_lease
            records_are_selected_by_their_origin
            records_are_selected_by_their_trace
            recent_records_are_counted_apart
            what_has_expired_is_not_listed
            counts_are_those_of_the_listing
            a_released_record_is_not_abandoned
            a_version_of_a_listing_is_that_of_the_record
        }
    };
}

/// Makes a `#[test]` of every case, for the store that the harness gives: as [`conformance!`](crate::conformance!).
#[macro_export]
macro_rules! inspect_conformance {
    ($module:ident, $harness:expr) => {
        #[cfg(test)]
        mod $module {
            use super::*;
            $crate::__for_every_inspecting_case!($crate::__test_of_every_inspecting_case, ($harness));
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __test_of_every_inspecting_case {
    (($harness:expr), $($case:ident)+) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::run($harness, |subject| {
                    ::std::boxed::Box::pin($crate::inspecting::$case(subject))
                });
            }
        )+
    };
}

fn inspect(subject: &Subject) -> Arc<dyn Inspect> {
    Arc::clone(subject.inspect.as_ref().expect("the subject is inspected by a store"))
}

/// All records that `filter` selects, read in parts of `limit`.
async fn listed(subject: &Subject, filter: &RecordFilter, limit: u32) -> Vec<RecordSummary> {
    let (store, limit) = (inspect(subject), NonZeroU32::new(limit).expect("a part has a record"));
    let (mut records, mut from) = (Vec::new(), None);
    for _ in 0..1_000 {
        let page = store.list(filter, from.as_ref(), limit).await.expect("list: the store could not answer");
        assert_eq!(page.unreadable, 0);
        assert!(page.records.len() as u64 <= page.scanned, "{page:?}");
        records.extend(page.records);
        match page.next {
            Some(next) => from = Some(next),
            None => return records,
        }
    }
    panic!("the listing never ends");
}

async fn counted(subject: &Subject, limit: u32) -> RecordCounts {
    let (store, limit) = (inspect(subject), NonZeroU32::new(limit).expect("a part has a record"));
    let (mut counts, mut from) = (RecordCounts::default(), None);
    for _ in 0..1_000 {
        let page = store.count(from.as_ref(), limit).await.expect("count: the store could not answer");
        counts.merge(&page.counts);
        match page.next {
            Some(next) => from = Some(next),
            None => return counts,
        }
    }
    panic!("the count never ends");
}

fn ids(records: &[RecordSummary]) -> Vec<RecordId> {
    let mut ids: Vec<_> = records.iter().map(|record| record.id).collect();
    ids.sort_unstable();
    ids
}

fn sorted(requests: &[&Acquire]) -> Vec<RecordId> {
    let mut ids: Vec<_> = requests.iter().map(|request| request.id).collect();
    ids.sort_unstable();
    ids
}

/// One record of each state; the second one has a checkpoint.
async fn one_of_each(subject: &Subject) -> BTreeMap<StateName, Acquire> {
    let mut made = BTreeMap::new();
    let settlements = [
        (StateName::InProgress, None),
        (StateName::Completed, Some(completed())),
        (StateName::Failed, Some(failed())),
        (StateName::OutcomeUnknown, Some(Settlement::OutcomeUnknown)),
        (StateName::Retryable, Some(retryable())),
    ];
    for (name, settlement) in settlements {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.checkpoint(&lease, &checkpoint("charged")).await;
        if let Some(settlement) = settlement {
            subject.settle(&lease, &settlement).await;
        }
        made.insert(name, request);
    }
    made
}

/// An empty store has one part, without a record.
pub async fn nothing_is_listed_of_an_empty_store(subject: &Subject) {
    assert_eq!(listed(subject, &RecordFilter::default(), 1).await, []);
    assert_eq!(counted(subject, 1).await, RecordCounts::default());
    let found = inspect(subject).inspect(&request().id).await.expect("inspect: the store could not answer");
    assert_eq!((found.record, found.origin, found.runs_in_transaction), (None, None, false));
}

/// A record is shown whole, with its origin if the store keeps it.
pub async fn a_record_is_shown_as_it_is(subject: &Subject) {
    for takeover in [Takeover::Rerun, Takeover::Unknown] {
        for scope in [Scope::new("acme", "POST /v1/payments"), Scope::single_tenant("nightly")] {
            let origin = Origin { namespace: "inspected".into(), scope };
            let request = Acquire { takeover, origin, ..request() };
            let lease = subject.lease(&request).await;
            for settlement in [None, Some(completed())] {
                if let Some(settlement) = settlement {
                    subject.settle(&lease, &settlement).await;
                }
                let shown = inspect(subject).inspect(&request.id).await.expect("inspect: the store could not answer");
                assert_eq!(shown.record.as_ref(), Some(&subject.record(&request.id).await));
                assert!(!shown.runs_in_transaction);
                assert_time(subject, "now", shown.now, subject.now().await);
                let expected = Some(request.origin.clone()).filter(|_| subject.keeps_origins);
                assert_eq!(shown.origin, expected);
            }
        }
    }
}

/// Whatever the size of a part, each record is listed once.
pub async fn a_listing_has_each_record_once(subject: &Subject) {
    let mut expected = Vec::new();
    for _ in 0..23 {
        let request = request();
        subject.lease(&request).await;
        expected.push(request.id);
    }
    expected.sort_unstable();
    for limit in [1, 7, 23, 24, 1_000] {
        assert_eq!(ids(&listed(subject, &RecordFilter::default(), limit).await), expected, "parts of {limit}");
    }
}

/// A summary agrees with the record, but for its answer, which it has not.
pub async fn a_listing_says_what_a_record_says(subject: &Subject) {
    let mut made: Vec<Acquire> = one_of_each(subject).await.into_values().collect();
    let tombstone = request();
    let lease = subject.lease(&tombstone).await;
    let answer = StoredResponse { body: StoredBody::NotRetained, ..response() };
    subject.settle(&lease, &Settlement::Completed(answer)).await;
    made.push(tombstone);
    let records = listed(subject, &RecordFilter::default(), 4).await;
    assert_eq!(records.len(), made.len());
    for request in made {
        let summary = records.iter().find(|record| record.id == request.id).expect("it is listed");
        let origin = Some(request.origin.clone()).filter(|_| subject.keeps_origins);
        assert_eq!(*summary, RecordSummary::new(request.id, origin, &subject.record(&request.id).await));
    }
}

/// The filter selects by state, by age and by whether the lease is over.
pub async fn records_are_selected_by_state_age_and_lease(subject: &Subject) {
    let made = one_of_each(subject).await;
    let select = async |filter: RecordFilter| ids(&listed(subject, &filter, 2).await);
    for (name, request) in &made {
        let filter = RecordFilter { states: vec![*name], ..RecordFilter::default() };
        assert_eq!(select(filter).await, [request.id], "{name}");
    }
    let states = vec![StateName::Failed, StateName::OutcomeUnknown];
    let two = select(RecordFilter { states, ..RecordFilter::default() }).await;
    assert_eq!(two, sorted(&[&made[&StateName::Failed], &made[&StateName::OutcomeUnknown]]));
    let abandoned = || RecordFilter { abandoned: true, ..RecordFilter::default() };
    assert_eq!(select(abandoned()).await, []);
    subject.advance_to_end_of(LEASE);
    let young = request();
    subject.lease(&young).await;
    let running = &made[&StateName::InProgress];
    assert_eq!(select(abandoned()).await, [running.id]);
    let older_than = Some(LEASE / 2);
    let states = vec![StateName::InProgress];
    assert_eq!(select(RecordFilter { states, older_than, ..RecordFilter::default() }).await, [running.id]);
    let older_than = Some(LEASE * 10);
    assert_eq!(select(RecordFilter { older_than, ..RecordFilter::default() }).await, []);
    let older_than = Some(Duration::MAX);
    assert_eq!(select(RecordFilter { older_than, ..RecordFilter::default() }).await, []);
}

/// The filter selects by namespace, principal and operation. A store that does not keep them says so.
pub async fn records_are_selected_by_their_origin(subject: &Subject) {
    let make = async |namespace: &str, scope: Scope| {
        let request = Acquire { origin: Origin { namespace: namespace.into(), scope }, ..request() };
        subject.lease(&request).await;
        request
    };
    let acme = make("one", Scope::new("acme", "pay")).await;
    let quoted = make("one", Scope::new("o'\\\"brien", "refund")).await;
    let nightly = make("two", Scope::single_tenant("pay")).await;
    let nothing = RecordFilter::default;
    let named = |text: &str| Some(text.to_owned());
    let cases = [
        (RecordFilter { namespace: named("one"), ..nothing() }, vec![&acme, &quoted]),
        (RecordFilter { principal: named("acme"), ..nothing() }, vec![&acme]),
        (RecordFilter { principal: named("o'\\\"brien"), ..nothing() }, vec![&quoted]),
        (RecordFilter { principal: named(""), ..nothing() }, vec![]),
        (RecordFilter { operation: named("pay"), ..nothing() }, vec![&acme, &nightly]),
        (RecordFilter { operation: named("pay"), namespace: named("two"), ..nothing() }, vec![&nightly]),
    ];
    for (filter, expected) in cases {
        if subject.keeps_origins {
            assert_eq!(ids(&listed(subject, &filter, 2).await), sorted(&expected), "{filter:?}");
        } else {
            let error =
                inspect(subject).list(&filter, None, NonZeroU32::MIN).await.expect_err("no record has an origin");
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{filter:?}");
        }
    }
}

/// The filter selects by the trace of the run that answered. The parent in the trace, and whether there is a body, do not matter.
pub async fn records_are_selected_by_their_trace(subject: &Subject) {
    let trace = |trace: char, parent: char| {
        let [trace, parent] = [(trace, 32), (parent, 16)].map(|(digit, count)| String::from(digit).repeat(count));
        format!("00-{trace}-{parent}-01").parse::<TraceParent>().expect("it is a trace")
    };
    let make = async |answer: StoredResponse, trace: Option<TraceParent>| {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.settle(&lease, &Settlement::Completed(StoredResponse { trace, ..answer })).await;
        request
    };
    let first = make(response(), Some(trace('1', 'a'))).await;
    let second = make(StoredResponse::new(200, ""), Some(trace('1', 'b'))).await;
    let other = make(response(), Some(trace('2', 'a'))).await;
    make(response(), None).await;
    subject.lease(&request()).await;
    for (wanted, expected) in
        [(trace('1', 'c'), sorted(&[&first, &second])), (trace('2', 'b'), sorted(&[&other])), (trace('3', 'a'), vec![])]
    {
        let filter = RecordFilter { trace: Some(wanted.trace_id()), ..RecordFilter::default() };
        assert_eq!(ids(&listed(subject, &filter, 2).await), expected, "{wanted}");
    }
    let all = listed(subject, &RecordFilter::default(), 10).await;
    let shown = all.iter().find(|record| record.id == second.id).expect("it is listed");
    assert_eq!(shown.trace, Some(trace('1', 'b')));
}

/// What was made in the last hour is counted apart, and what of it had no success.
pub async fn recent_records_are_counted_apart(subject: &Subject) {
    one_of_each(subject).await;
    let counts = counted(subject, 2).await;
    assert_eq!((counts.made_last_hour, counts.unsuccessful_last_hour), (5, 3), "failed, unknown and retryable");
    subject.advance_to_end_of(Duration::from_secs(3_600));
    let counts = counted(subject, 2).await;
    assert_eq!((counts.made_last_hour, counts.unsuccessful_last_hour), (0, 0));
    let crashed = request();
    subject.lease(&crashed).await;
    subject.advance_to_end_of(LEASE);
    subject.lease(&request()).await;
    let counts = counted(subject, 2).await;
    assert_eq!((counts.made_last_hour, counts.unsuccessful_last_hour), (2, 1));
}

/// What has expired counts as absent. It is counted until it is purged.
pub async fn what_has_expired_is_not_listed(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    subject.settle(&lease, &completed()).await;
    subject.advance_to_end_of(KEPT);
    let second = request();
    subject.lease(&second).await;
    assert_eq!(ids(&listed(subject, &RecordFilter::default(), 1).await), [second.id]);
    let shown = inspect(subject).inspect(&first.id).await.expect("inspect: the store could not answer");
    assert_eq!((shown.record, shown.origin), (None, None));
    let counts = counted(subject, 1).await;
    assert_eq!((counts.in_progress, counts.completed), (1, 0));
    subject.drain().await;
    let counts = counted(subject, 1).await;
    assert_eq!((counts.expired, counts.oldest_expired, counts.scanned()), (0, None, 1));
}

/// The counts are those of the records, whatever the size of a part.
pub async fn counts_are_those_of_the_listing(subject: &Subject) {
    let made = one_of_each(subject).await;
    let crashed = subject.record(&made[&StateName::InProgress].id).await;
    subject.advance_to_end_of(LEASE);
    for _ in 0..3 {
        subject.lease(&request()).await;
    }
    let records = listed(subject, &RecordFilter::default(), 100).await;
    let now = inspect(subject).count(None, NonZeroU32::MIN).await.expect("count: the store could not answer").now;
    let mut expected = RecordCounts::default();
    records.iter().for_each(|record| expected.add(record, now));
    assert_eq!((expected.in_progress, expected.abandoned, expected.scanned()), (3, 1, 8));
    assert_eq!(expected.oldest_in_progress, Some(crashed.created_at));
    for limit in [1, 3, 8, 100] {
        assert_eq!(counted(subject, limit).await, expected, "parts of {limit}");
    }
}

/// A record that its owner has released waits for its next attempt. It may be resolved without being made unknown first.
pub async fn a_released_record_is_not_abandoned(subject: &Subject) {
    let first = Acquire { takeover: Takeover::Unknown, ..request() };
    let lease = subject.lease(&first).await;
    subject.settle(&lease, &retryable()).await;
    subject.advance_to_end_of(BACKOFF);
    let lease = subject.lease(&repeat_of(&first)).await;
    subject.settle(&lease, &Settlement::Released).await;
    let abandoned = RecordFilter { abandoned: true, ..RecordFilter::default() };
    assert_eq!(listed(subject, &abandoned, 10).await, []);
    let waiting = RecordFilter { states: vec![StateName::Retryable], ..RecordFilter::default() };
    let [seen] = &listed(subject, &waiting, 10).await[..] else { panic!("it waits for its next attempt") };
    assert_eq!(seen.state.name(), StateName::Retryable);
    let counts = counted(subject, 10).await;
    assert_eq!((counts.retryable, counts.scanned()), (1, 1));
    let by = Resolve {
        id: first.id,
        action: OwnerToken::random(),
        seen: seen.version,
        resolution: Resolution::Completed(response()),
        retention: KEPT,
    };
    let operate = subject.operate.as_ref().expect("the subject is operated by a store");
    assert_eq!(operate.resolve(&by).await.expect("the store could not answer"), ResolveOutcome::Resolved);
    // A released probe has not found out whether the run before it took effect.
    let probing = Acquire { takeover: Takeover::Probe, ..request() };
    subject.lease(&probing).await;
    subject.advance_to_end_of(LEASE);
    let lease = subject.lease(&repeat_of(&probing)).await;
    subject.settle(&lease, &Settlement::Released).await;
    assert_eq!(ids(&listed(subject, &abandoned, 10).await), [probing.id]);
    assert_eq!(counted(subject, 10).await.abandoned, 1);
}

/// An operator resolves by the version of a listing. After that the record has another one.
pub async fn a_version_of_a_listing_is_that_of_the_record(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    subject.settle(&lease, &Settlement::OutcomeUnknown).await;
    let [seen] = &listed(subject, &RecordFilter::default(), 10).await[..] else { panic!("one record") };
    assert_eq!(seen.state, RecordState::OutcomeUnknown);
    let by = Resolve {
        id: request.id,
        action: OwnerToken::random(),
        seen: seen.version,
        resolution: Resolution::Completed(response()),
        retention: KEPT,
    };
    let operate = subject.operate.as_ref().expect("the subject is operated by a store");
    assert_eq!(operate.resolve(&by).await.expect("the store could not answer"), ResolveOutcome::Resolved);
    let [resolved] = &listed(subject, &RecordFilter::default(), 10).await[..] else { panic!("one record") };
    assert_eq!((resolved.state, resolved.attempt), (RecordState::Completed, 1));
    assert_ne!(resolved.version, seen.version);
}
