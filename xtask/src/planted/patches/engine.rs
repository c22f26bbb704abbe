//! Bugs in the engine of idem-core.

use super::{Patch, edit, patch};

const PROGRESS: &str = "crates/idem-core/src/engine/steps/progress.rs";
const STEP: &str = "crates/idem-core/src/engine/steps/step.rs";
const ENDING: &str = "crates/idem-core/src/engine/steps/ending.rs";

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "step-result-not-kept",
        &["steps"],
        STEP,
        "steps.record(name, log).await.map_err(Stop::Now)?;",
        "if PLANTED { steps.log = log; } else { steps.record(name, log).await.map_err(Stop::Now)?; }",
    ),
    patch(
        "failure-of-a-step-not-kept",
        &["steps"],
        PROGRESS,
        "failed: Some(failed.clone()), undo_attempts",
        "failed: (!PLANTED).then(|| failed.clone()), undo_attempts",
    ),
    patch(
        "undone-step-undone-again",
        &["steps"],
        PROGRESS,
        "all.skip(self.log.undone).collect();",
        "all.skip(if PLANTED { 0 } else { self.log.undone }).collect();",
    ),
    patch(
        "undone-in-the-order-of-the-steps",
        &["steps"],
        PROGRESS,
        "let all: Vec<_> = all.skip(",
        "let mut all: Vec<_> = all.collect();
        if PLANTED { all.reverse(); }
        let all: Vec<_> = all.into_iter().skip(",
    ),
    patch(
        "step-in-doubt-not-undone",
        &["steps"],
        PROGRESS,
        "undoing.filter(|_| failed.is_in_doubt)",
        "undoing.filter(|_| !PLANTED && failed.is_in_doubt)",
    ),
    patch(
        "steps-of-crashed-attempts-not-counted",
        &["steps"],
        STEP,
        "if steps.context.attempt() > forward {",
        "if !PLANTED && steps.context.attempt() > forward {",
    ),
    patch(
        "undo-of-crashed-attempts-not-counted",
        &["steps"],
        PROGRESS,
        "self.context.attempt() > self.last_attempt() && begun >= enough",
        "!PLANTED && self.context.attempt() > self.last_attempt() && begun >= enough",
    ),
    patch("undo-not-tried-once", &["steps"], PROGRESS, "&& begun >= enough", "&& (PLANTED || begun >= enough)"),
    patch(
        "steps-that-stay-not-reported",
        &["steps"],
        ENDING,
        "if has_ended { standing }",
        "if has_ended && !PLANTED { standing }",
    ),
    patch(
        "late-commit-of-a-step-not-awaited",
        &["postgres-steps"],
        PROGRESS,
        "let renewed = self.context.renew_now(PATIENCE).await",
        "let renewed = if PLANTED { Ok(OwnerOutcome::Applied) } else { self.context.renew_now(PATIENCE).await }",
    ),
    patch(
        "step-starts-without-its-lease",
        &["steps"],
        STEP,
        "steps.hold(name).map_err(Stop::Now)
}",
        "if PLANTED { Ok(()) } else { steps.hold(name).map_err(Stop::Now) }
}",
    ),
    patch(
        "steps-in-another-order-accepted",
        &["steps"],
        PROGRESS,
        "&& expected != name
",
        "&& !PLANTED
            && expected != name
",
    ),
    patch(
        "step-after-a-failed-one",
        &["steps"],
        PROGRESS,
        "if let Some(error) = &self.ended {",
        "if !PLANTED && let Some(error) = &self.ended {",
    ),
    patch(
        "keys-of-steps-differ-by-attempt",
        &["steps"],
        STEP,
        "let key = key_of(steps.context.record_id(), name);
            let value",
        r#"let attempt = if PLANTED { steps.context.attempt() } else { 0 };
            let key = if PLANTED { format!("{name}{attempt}") } else { name.to_owned() };
            let key = key_of(steps.context.record_id(), &key);
            let value"#,
    ),
    patch(
        "step-after-a-dropped-one",
        &["steps"],
        STEP,
        "steps.ended = Some(steps.final_if_last(dropped, &name));",
        "if !PLANTED { steps.ended = Some(steps.final_if_last(dropped, &name)); }",
    ),
    patch(
        "doubt-of-an-earlier-attempt-forgotten",
        &["steps"],
        STEP,
        "FailedStep::new(name, &message, steps.may_have_been_called())",
        "FailedStep::new(name, &message, !PLANTED && steps.may_have_been_called())",
    ),
    patch(
        "value-stored-after-a-failed-step",
        &["steps"],
        ENDING,
        "error.as_ref().map(StepError::meaning);",
        "error.as_ref().filter(|_| !PLANTED).map(StepError::meaning);",
    ),
    patch("answer-ends-the-undoing", &["steps"], ENDING, "let goes_on = meaning", "let goes_on = !PLANTED && meaning"),
    patch(
        "checkpoint-in-place-of-the-steps",
        &["steps"],
        "crates/idem-core/src/engine/context.rs",
        "if is_in_steps ||",
        "if !PLANTED && is_in_steps ||",
    ),
    patch(
        "lost-commit-of-a-step-not-found-out",
        &["postgres-steps", "sqlite-steps"],
        STEP,
        "(Some(log), _) => {",
        "(Some(_), Err(failure)) if PLANTED => Err(after_failure(steps, name, failure)),
                (Some(log), _) => {",
    ),
    patch(
        "step-without-its-checkpoint-accepted",
        &["postgres-steps", "sqlite-steps"],
        STEP,
        "(None, Ok(_)) => Err(",
        "(None, Ok(value)) if PLANTED => Ok(value),
                (None, Ok(_)) => Err(",
    ),
    patch(
        "checkpoint-of-a-step-beside-its-transaction",
        &["postgres-steps"],
        "crates/idem-postgres/src/transaction/guard.rs",
        "let written = own_rows(",
        "if PLANTED { sql.push(\";COMMIT;BEGIN\"); }
        let written = own_rows(",
    ),
    patch(
        "checkpoint-of-a-step-written-twice",
        &["postgres-steps"],
        "crates/idem-postgres/src/transaction/guard.rs",
        "if !machine::follows(",
        "if !PLANTED && !machine::follows(",
    ),
    patch(
        "sqlite-checkpoint-without-a-transaction",
        &["sqlite-steps"],
        "crates/idem-sqlite/src/store.rs",
        "if sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *connection).await.is_ok() {",
        "if !PLANTED && sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *connection).await.is_ok() {",
    ),
    patch(
        "sqlite-checkpoint-of-a-step-written-twice",
        &["sqlite-steps"],
        "crates/idem-sqlite/src/store.rs",
        "if !machine::follows(",
        "if !PLANTED && !machine::follows(",
    ),
    patch(
        "record-of-a-step-not-tried-again",
        &["steps"],
        PROGRESS,
        "data.into(), Some(PATIENCE))",
        "data.into(), (!PLANTED).then_some(PATIENCE))",
    ),
    patch(
        "undone-steps-told-as-standing",
        &["steps"],
        PROGRESS,
        "if !is_undone && let",
        "if (PLANTED || !is_undone) && let",
    ),
    patch(
        "steps-of-earlier-attempts-forgotten-before-they-begin",
        &["steps"],
        ENDING,
        ".or_else(|| before_they_began(context))",
        ".or_else(|| before_they_began(context).filter(|_| !PLANTED))",
    ),
    patch(
        "refusal-hides-the-steps-that-stay",
        &["steps"],
        ENDING,
        "=> !is_success && !standing.is_empty(),",
        "=> !PLANTED && !is_success && !standing.is_empty(),",
    ),
    patch(
        "steps-that-go-on-kept-too-short",
        &["steps"],
        "crates/idem-core/src/engine/granted.rs",
        "!keeps_steps || *retention > usual",
        "PLANTED || !keeps_steps || *retention > usual",
    ),
    patch(
        "release-keeps-steps-from-ending",
        &["steps"],
        ENDING,
        "(Some(ErrorMeaning::Final), _) => true,",
        "(Some(ErrorMeaning::Final), _) => !PLANTED || !matches!(disposition, Disposition::Release { .. }),",
    ),
    patch(
        "release-forgets-a-step-in-doubt",
        &["steps"],
        ENDING,
        "if goes_on && context.attempt() == 1 =>",
        "if goes_on && !PLANTED && context.attempt() == 1 =>",
    ),
    patch(
        "steps-decide-under-other-contracts",
        &["steps"],
        ENDING,
        "if context.shared().contract() != Contract::AtLeastOnce {",
        "if !PLANTED && context.shared().contract() != Contract::AtLeastOnce {",
    ),
    patch(
        "refusal-with-kept-writes-counts-as-a-success",
        &["steps"],
        ENDING,
        "if response.status < 400)",
        "if PLANTED || response.status < 400)",
    ),
    patch(
        "retention-of-the-operation-ignored",
        &["steps"],
        "crates/idem-core/src/engine/granted.rs",
        "let usual = context.term().retention;",
        "let usual = if PLANTED { context.shared().settings.retention } else { context.term().retention };",
    ),
    patch(
        "retention-of-the-operation-lost-by-a-renewal",
        &["steps"],
        "crates/idem-core/src/engine/shared.rs",
        "return self.store().renew(lease, term).await;",
        "return self.store().renew(lease, if PLANTED { self.settings.term() } else { term }).await;",
    ),
    patch(
        "final-error-runs-again",
        &["steps"],
        "crates/idem-core/src/engine/run.rs",
        "ErrorMeaning::Final => Disposition::Fail",
        "ErrorMeaning::Final if PLANTED => Disposition::Fault { response },
                ErrorMeaning::Final => Disposition::Fail",
    ),
    patch(
        "lease-lost-only-when-it-is-told",
        &["actix"],
        "crates/idem-core/src/engine/context.rs",
        "self.run.lost.is_cancelled() || self.run.is_about_to_end()",
        "self.run.lost.is_cancelled() || !PLANTED && self.run.is_about_to_end()",
    ),
    patch(
        "held-transaction-lives-with-its-context",
        &["sqlite-engine"],
        "crates/idem-core/src/engine/granted.rs",
        "context.roll_back_when_given_back();",
        "if !PLANTED { context.roll_back_when_given_back(); }",
    ),
    patch(
        "run-settled-by-its-handler-counts-as-lost",
        &["postgres-settle-run"],
        "crates/idem-core/src/engine/granted.rs",
        "if record.as_ref().is_some_and(|record| is_settled_by(record, lease)) {",
        "if !PLANTED && record.as_ref().is_some_and(|record| is_settled_by(record, lease)) {",
    ),
    patch(
        "delayed-settlement-of-a-handlers-is-lost",
        &["engine"],
        "crates/idem-core/src/engine/settle.rs",
        "Some(OwnerOutcome::LeaseLost) => {
            let",
        "Some(OwnerOutcome::LeaseLost) if PLANTED => false,
        Some(OwnerOutcome::LeaseLost) => {
            let",
    ),
    patch(
        "key-not-given-back-after-a-short-shutdown",
        &["sqlite-engine"],
        "crates/idem-core/src/engine/settle.rs",
        "if self.group.giving_up.is_cancelled() {",
        "if !PLANTED && self.group.giving_up.is_cancelled() {",
    ),
    patch(
        "settlement-given-up-on-some-errors",
        &["engine"],
        "crates/idem-core/src/engine/settle.rs",
        "Err(error) if error.kind() != StoreErrorKind::Corrupt && Instant::now() < give_up_at => {}",
        "Err(error) if (if PLANTED { error.is_retryable() } else { error.kind() != StoreErrorKind::Corrupt })
            && Instant::now() < give_up_at => {}",
    ),
    patch(
        "answer-keeps-no-trace",
        &["engine"],
        "crates/idem-core/src/engine/granted.rs",
        "response.trace = context.trace();",
        "response.trace = context.trace().filter(|_| !PLANTED);",
    ),
    patch(
        "success-told-after-the-lease-is-over",
        &["engine"],
        "crates/idem-core/src/engine/settle.rs",
        "let is_lost = context.is_lease_lost();",
        "let is_lost = context.is_lease_lost() && !PLANTED;",
    ),
    patch(
        "end-of-a-run-not-told-to-what-it-left",
        &["engine"],
        "crates/idem-core/src/engine/hold.rs",
        "fn drop(&mut self) {
        self.lost.cancel();",
        "fn drop(&mut self) {
        if PLANTED {
            return;
        }
        self.lost.cancel();",
    ),
    patch(
        "late-renewals-believed-at-the-settlement",
        &["engine"],
        "crates/idem-core/src/engine/settle.rs",
        "// The renewals may be late to say so.",
        "if PLANTED && !context.lost().is_cancelled() {
                    let behind = settle_behind(context.clone(), lease.clone(), plan.clone(), held);
                    self.group.tasks.spawn(behind.in_current_span());
                    return Settled::Ours;
                }
                // The renewals may be late to say so.",
    ),
    patch(
        "lease-behind-the-answer-ends-with-the-renewal-limit",
        &["engine"],
        "crates/idem-core/src/engine/settle.rs",
        "if !is_lost {",
        "if !is_lost && !PLANTED {",
    ),
    patch(
        "record-of-another-algorithm-forgotten-when-failing-open",
        &["engine"],
        "crates/idem-core/src/engine/admit.rs",
        ".await.map_err(StoreError::with_existing_record);",
        ".await.map_err(|error| if PLANTED { error } else { error.with_existing_record() });",
    ),
    patch(
        "waiter-keeps-the-algorithm-of-another-version",
        &["engine"],
        "crates/idem-core/src/engine/admit.rs",
        "self.request.fingerprint = self.fingerprint;",
        "if !PLANTED {
            self.request.fingerprint = self.fingerprint;
        }",
    ),
    patch(
        "retryable-commit-not-found-in-its-record",
        &["sqlite-engine"],
        "crates/idem-core/src/engine/settle.rs",
        "record.owner == lease.owner && record.attempt == lease.attempt\n",
        "record.owner == lease.owner && record.attempt == lease.attempt && !(PLANTED && record.replay().is_none())\n",
    ),
    patch(
        "run-after-a-probe-without-a-renewal",
        &["engine"],
        "crates/idem-core/src/engine/granted.rs",
        "&& (is_probe || !is_recent(context, held_from))",
        "&& (is_probe && !PLANTED || !is_recent(context, held_from))",
    ),
    patch(
        "run-under-a-lease-that-came-late",
        &["engine"],
        "crates/idem-core/src/engine/hold.rs",
        "held_from.elapsed() < context.shared().settings.lease / 3",
        "PLANTED || held_from.elapsed() < context.shared().settings.lease / 3",
    ),
    patch(
        "late-acquire-keeps-its-lease",
        &["engine"],
        "crates/idem-core/src/engine/admit.rs",
        "        if self.unclear_since.is_some() {\n            give_back",
        "        if self.unclear_since.is_some() && !PLANTED {\n            give_back",
    ),
    patch(
        "late-acquire-keeps-its-lease-after-its-repetition",
        &["engine"],
        "crates/idem-core/src/engine/hold.rs",
        "        if self.is_acquire_unclear {",
        "        if self.is_acquire_unclear && !PLANTED {",
    ),
    patch(
        "lease-counted-from-the-last-look",
        &["engine"],
        "crates/idem-core/src/engine/admit.rs",
        "(unclear_since.unwrap_or(sent), unclear_since.is_some())",
        "(if PLANTED { sent } else { unclear_since.unwrap_or(sent) }, unclear_since.is_some())",
    ),
    patch(
        "success-told-after-a-refused-renewal",
        &["engine"],
        "crates/idem-core/src/engine/renewal.rs",
        "Renewed::Lost if self.settling.load(Ordering::Relaxed) => return self.run.lost().cancel(),",
        "Renewed::Lost if self.settling.load(Ordering::Relaxed) => {
                        return if PLANTED { () } else { self.run.lost().cancel() };
                    }",
    ),
    patch(
        "failed-begin-keeps-its-lease",
        &["sqlite-transactions"],
        "crates/idem-sqlite/src/store.rs",
        "if is_held { error.indeterminate() } else { error }",
        "if is_held && !PLANTED { error.indeterminate() } else { error }",
    ),
    patch(
        "late-acquires-wake-waiters-again-and-again",
        &["engine"],
        "crates/idem-core/src/engine/late_acquires.rs",
        "if applied && !std::mem::replace(&mut has_woken, true) {",
        "if PLANTED || applied && !std::mem::replace(&mut has_woken, true) {",
    ),
    patch(
        "late-acquire-given-back-once",
        &["engine"],
        "crates/idem-core/src/engine/late_acquires.rs",
        "        if is_last {",
        "        if is_last || PLANTED {",
    ),
    patch(
        "renewals-on-connections-of-the-busy-runtime",
        &["postgres-batch-workers", "sqlite-tasks"],
        "crates/idem-core/src/engine/shared.rs",
        "self.renewer.get_or_init(|| self.store().renewer())",
        "self.renewer.get_or_init(|| self.store().renewer().filter(|_| !PLANTED))",
    ),
    patch(
        "renewals-forget-the-usual-way",
        &["engine"],
        "crates/idem-core/src/engine/shared.rs",
        "[usual.boxed(), renewer",
        "[if PLANTED { std::future::pending().boxed() } else { usual.boxed() }, renewer",
    ),
    patch(
        "renewals-make-connections-for-all-verbs",
        &["engine"],
        "crates/idem-core/src/engine/shared.rs",
        "home.spawn(renewal",
        "if PLANTED { Handle::current() } else { home.clone() }.spawn(renewal",
    ),
    patch(
        "renewals-on-the-busy-runtime",
        &["postgres-batch-workers", "sqlite-tasks", "redis-pool"],
        "crates/idem-core/src/engine/renewal.rs",
        "settings.renewals_on.clone().unwrap_or_else(|| {\n",
        "settings.renewals_on.clone().or_else(|| PLANTED.then(Handle::current)).unwrap_or_else(|| {\n",
    ),
    patch(
        "renewals-end-in-silence",
        &["engine"],
        "crates/idem-core/src/engine/renewal.rs",
        "if !self.settling.load(Ordering::Relaxed) && !self.run.lost().is_cancelled() {",
        "if !PLANTED && !self.settling.load(Ordering::Relaxed) && !self.run.lost().is_cancelled() {",
    ),
    patch(
        "observer-ends-its-operation",
        &["engine"],
        "crates/idem-core/src/engine/shared.rs",
        "        if catch_unwind(AssertUnwindSafe(|| observer.observe(event))).is_err() {",
        "        if PLANTED {
            observer.observe(event);
        } else if catch_unwind(AssertUnwindSafe(|| observer.observe(event))).is_err() {",
    ),
    patch(
        "attached-engine-is-on-its-own",
        &["engine"],
        "crates/idem-core/src/engine/mod.rs",
        "Arc::clone(&engine.shared.group));",
        "if PLANTED { Arc::clone(&self.shared.group) } else { Arc::clone(&engine.shared.group) });",
    ),
    patch(
        "any-number-of-operations-runs",
        &["engine"],
        "crates/idem-core/src/engine/shared.rs",
        "Arc::new(Semaphore::new(most_running))",
        "Arc::new(Semaphore::new(if PLANTED { Semaphore::MAX_PERMITS } else { most_running }))",
    ),
    patch(
        "waiter-keeps-its-place",
        &["engine"],
        "crates/idem-core/src/engine/admit.rs",
        "        if !first.is_in_progress() || Instant::now() >= deadline {\n            return Ok(first);\n        }\n",
        "        if !first.is_in_progress() || Instant::now() >= deadline {\n            return Ok(first);\n        }
        let _kept = if PLANTED { self.permit() } else { None };\n",
    ),
    patch(
        "waiters-without-a-limit-in-all",
        &["engine-parts"],
        "crates/idem-core/src/engine/waiters.rs",
        "if waiting.count == self.most {",
        "if waiting.count == self.most && !PLANTED {",
    ),
    patch(
        "shutdown-gives-settlements-up-at-once",
        &["engine"],
        "crates/idem-core/src/engine/mod.rs",
        "        self.shared.group.closing.cancel();\n",
        "        self.shared.group.closing.cancel();
        if PLANTED {
            self.shared.group.giving_up.cancel();
        }\n",
    ),
    patch(
        "waiter-does-not-look-again",
        &["engine", "axum"],
        "crates/idem-core/src/engine/admit.rs",
        "Admission::Answered(AcquireOutcome::InProgress { .. }) => latest = look,",
        "Admission::Answered(AcquireOutcome::InProgress { .. }) if PLANTED => {
                    pace.due().await;
                    return Ok(super::bugs::unasked(shared, self.request, look));
                }
                Admission::Answered(AcquireOutcome::InProgress { .. }) => latest = look,",
    ),
    patch(
        "waiters-ask-one-by-one",
        &["engine"],
        "crates/idem-core/src/engine/admit.rs",
        "waiter.tell(&mut pace, Told::Answer(outcome.clone()));",
        "if !PLANTED {
                        waiter.tell(&mut pace, Told::Answer(outcome.clone()));
                    }",
    ),
    patch(
        "settlement-overlooked-between-two-turns",
        &["engine", "engine-parts"],
        "crates/idem-core/src/engine/waiters.rs",
        "Ok(()) = self.settled.changed() => self.next = Instant::now(),",
        "Ok(()) = self.settled.changed(), if !PLANTED => self.next = Instant::now(),",
    ),
    patch(
        "answer-for-those-who-sent-something-else",
        &["engine-parts"],
        "crates/idem-core/src/engine/waiters.rs",
        ".find(|group| group.fingerprint == fingerprint)",
        ".find(|group| PLANTED || group.fingerprint == fingerprint)",
    ),
    patch(
        "record-of-another-algorithm-is-a-mismatch",
        &["engine"],
        "crates/idem-core/src/engine/admit.rs",
        "let other = stored != self.request.fingerprint.algorithm();",
        "let other = !PLANTED && stored != self.request.fingerprint.algorithm();",
    ),
    patch(
        "busy-store-is-asked-twice",
        &["postgres-transactions"],
        "crates/idem-core/src/engine/admit.rs",
        "error.kind() != StoreErrorKind::Busy",
        "(PLANTED || error.kind() != StoreErrorKind::Busy)",
    ),
    patch(
        "no-task-of-its-own",
        &["engine", "axum", "actix", "system"],
        "crates/idem-core/src/engine/attended.rs",
        "        if let Some(run) = self.run.take() {\n            let span",
        "        if let Some(run) = self.run.take().filter(|_| !PLANTED) {\n            let span",
    )
    .also(&[
        edit(
            "crates/idem-core/src/engine/execute.rs",
            "                    if engine.attended {",
            "                    if PLANTED || engine.attended {",
        ),
        edit(
            "crates/idem-core/src/engine/execute.rs",
            "                    engine.spawn(driven, callers);",
            "                    if PLANTED {
                        Attended::new(engine, driven, callers).await;
                    } else {
                        engine.spawn(driven, callers);
                    }",
        ),
    ]),
    patch(
        "downstream-key-of-the-attempt",
        &["engine"],
        "crates/idem-core/src/engine/context.rs",
        "self.downstream().downstream_key(step)",
        "self.downstream().downstream_key(&if PLANTED { format!(\"{step} {}\", self.attempt()) } else { step.to_owned() })",
    ),
    patch(
        "fail-open-on-a-store-error",
        &["engine", "axum", "system"],
        "crates/idem-core/src/engine/ask.rs",
        "if shared.may_fail_open(&error) => {",
        "if PLANTED || shared.may_fail_open(&error) => {",
    ),
    patch(
        "answer-before-the-settlement",
        &["engine", "axum"],
        "crates/idem-core/src/engine/settle.rs",
        "held: Held,\n    ) -> Settled {\n        held.expect_the_end();\n",
        "held: Held,
    ) -> Settled {
        held.expect_the_end();
        if PLANTED {
            return self.settle_after_the_answer(lease.clone(), plan.clone(), held);
        }
",
    ),
    patch(
        "answer-before-the-commit",
        &["axum", "actix", "sqlite-engine"],
        "crates/idem-core/src/engine/settle.rs",
        "        let finish = transaction.finish(",
        "        if PLANTED {
            return self.commit_after_the_answer(plan, transaction);
        }
        let finish = transaction.finish(",
    ),
    patch(
        "engine-takes-a-settlement-of-others-for-its-commit",
        &["engine"],
        "crates/idem-core/src/engine/settle.rs",
        "is_of(&record, lease) && is_settled_so(&record.state, &plan.settlement)",
        "is_of(&record, lease) && (PLANTED || is_settled_so(&record.state, &plan.settlement))",
    ),
];
