//! Bugs in idem-jobs, and in what answers with the results of jobs.

use super::{Patch, edit, patch};

const JOBS: &str = "crates/idem-jobs/src/jobs.rs";
const WORKER: &str = "crates/idem-jobs/src/worker.rs";
const POSTGRES: &str = "crates/idem-jobs/src/postgres.rs";
const SQLITE: &str = "crates/idem-jobs/src/sqlite.rs";
const REDIS: &str = "crates/idem-jobs/src/redis.rs";

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "job-ended-before-its-result",
        &["jobs"],
        WORKER,
        "        let mut run = pin!(self.run(&delivery, claimed_at));",
        "        if PLANTED {
            self.report(&delivery, Report::Ended { is_parked: false }).await;
        }
        let mut run = pin!(self.run(&delivery, claimed_at));",
    ),
    patch(
        "poison-never-parked",
        &["jobs"],
        WORKER,
        "*unreported > self.jobs.most_unreported()",
        "!PLANTED && *unreported > self.jobs.most_unreported()",
    ),
    patch(
        "job-parked-in-spite-of-its-result",
        &["jobs"],
        WORKER,
        "                Ok(JobState::Ended(_)) => {",
        "                Ok(JobState::Ended(_)) if PLANTED => Report::Again(TRY_AGAIN),
                Ok(JobState::Ended(_)) => {",
    ),
    patch(
        "deadline-ignored",
        &["jobs"],
        WORKER,
        "if is_poison || claimed_at.elapsed() >= remaining {",
        "if is_poison || !PLANTED && claimed_at.elapsed() >= remaining {",
    )
    .also(&[edit(
        WORKER,
        "            if claimed_at.elapsed() >= remaining {\n                return GiveUp",
        "            if !PLANTED && claimed_at.elapsed() >= remaining {\n                return GiveUp",
    )]),
    patch(
        "deadline-ignored-by-those-who-ask",
        &["jobs"],
        JOBS,
        "        if queued.is_overdue {",
        "        if !PLANTED && queued.is_overdue {",
    ),
    patch(
        "job-not-held-while-it-runs",
        &["jobs"],
        WORKER,
        "                _ = due.tick() => {",
        "                _ = due.tick(), if !PLANTED => {",
    ),
    patch(
        "fault-of-a-transaction-not-counted",
        &["jobs"],
        WORKER,
        "(Left::AnotherAttempt { after: None }, Disposition::Retry { response, after: None })",
        "(
            Left::AnotherAttempt { after: None },
            if PLANTED { Disposition::Fault { response } } else { Disposition::Retry { response, after: None } },
        )",
    ),
    patch(
        "shutdown-leaves-jobs-that-run",
        &["jobs"],
        WORKER,
        "        while running.join_next().await.is_some() {}",
        "        while !PLANTED && running.join_next().await.is_some() {}",
    ),
    patch(
        "worker-not-woken",
        &["jobs"],
        JOBS,
        "        enqueued.notify_one();",
        "        if !PLANTED {\n            enqueued.notify_one();\n        }",
    ),
    patch(
        "request-forgotten-before-its-job",
        &["jobs"],
        JOBS,
        "settings.deadline + settings.longest_run + engine.settings().record_retention();",
        "if PLANTED { settings.deadline } else { settings.deadline + settings.longest_run + engine.settings().record_retention() };",
    ),
    patch(
        "job-shown-to-strangers",
        &["jobs"],
        JOBS,
        "Some(queued) if queued.job.principal.as_deref() == principal =>",
        "Some(queued) if PLANTED || queued.job.principal.as_deref() == principal =>",
    ),
    patch(
        "lost-job-accepted-for-ever",
        &["jobs"],
        JOBS,
        "            return Ok(Some(lost()));",
        "            return Ok((!PLANTED).then(lost));",
    ),
    patch(
        "other-answers-continued",
        &["jobs"],
        JOBS,
        "if first.status != StatusCode::ACCEPTED || location_of(first) != Some(expected.as_bytes()) {",
        "if !PLANTED && (first.status != StatusCode::ACCEPTED || location_of(first) != Some(expected.as_bytes())) {",
    ),
    patch(
        "continuation-ignored",
        &["http"],
        "crates/idem-http/src/protection.rs",
        "self.continuation.as_ref().filter(|_| first.kind == ReplayKind::Completed)",
        "self.continuation.as_ref().filter(|_| !PLANTED && first.kind == ReplayKind::Completed)",
    ),
    patch(
        "job-outside-of-its-transaction",
        &["jobs-postgres"],
        POSTGRES,
        "Ok(mut transaction) => self.insert(&mut transaction, job, deadline).await,",
        "Ok(mut transaction) if !PLANTED => self.insert(&mut transaction, job, deadline).await,
            Ok(_) => {
                let mut connection = self.pool.acquire().await.map_err(|error| failed(\"enqueue\", error))?;
                self.insert(&mut connection, job, deadline).await
            }",
    ),
    patch(
        "late-report-of-a-job-counts-in-postgres",
        &["jobs-postgres"],
        POSTGRES,
        "put_back: in_schema(PUT_BACK),",
        "put_back: if PLANTED { in_schema(PUT_BACK).replace(\"delivered = $2\", \"$2 > 0\") } else { in_schema(PUT_BACK) },",
    ),
    patch(
        "suspects-delivered-together-in-postgres",
        &["jobs-postgres"],
        POSTGRES,
        "bind(i64::from(with_suspect))",
        "bind(if PLANTED { 100 } else { i64::from(with_suspect) })",
    ),
    patch(
        "ended-job-delivered-by-sqlite",
        &["jobs-sqlite"],
        SQLITE,
        "        self.execute(\"end\", END, (id, i64::from(is_parked), keep)).await.map(drop)",
        "        if PLANTED {
            return Ok(());
        }
        self.execute(\"end\", END, (id, i64::from(is_parked), keep)).await.map(drop)",
    ),
    patch(
        "late-report-of-a-job-counts-in-redis",
        &["jobs-redis"],
        REDIS,
        "hold: Script::new(include_str!(\"../lua/hold.lua\")),",
        "hold: if PLANTED {
                Script::new(&include_str!(\"../lua/hold.lua\").replacen(\"if redis.call('HGET', KEYS[1], 'delivered') ~= ARGV[2] then return 0 end\", \"\", 1))
            } else {
                Script::new(include_str!(\"../lua/hold.lua\"))
            },",
    ),
    patch(
        "second-job-of-a-request-in-redis",
        &["jobs-redis"],
        REDIS,
        "enqueue: Script::new(include_str!(\"../lua/enqueue.lua\")),",
        "enqueue: if PLANTED {
                Script::new(&include_str!(\"../lua/enqueue.lua\").replacen(\"if name then return name end\", \"\", 1))
            } else {
                Script::new(include_str!(\"../lua/enqueue.lua\"))
            },",
    ),
];
