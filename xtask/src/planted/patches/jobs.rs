//! Bugs in idem-jobs, and in what answers with the results of jobs.

use super::{Patch, patch};

const JOBS: &str = "crates/idem-jobs/src/jobs.rs";
const WORKER: &str = "crates/idem-jobs/src/worker/mod.rs";
const RUN: &str = "crates/idem-jobs/src/worker/run.rs";
const REPORT: &str = "crates/idem-jobs/src/worker/report.rs";
const POSTGRES: &str = "crates/idem-jobs/src/postgres.rs";
const SQLITE: &str = "crates/idem-jobs/src/sqlite.rs";
const REDIS: &str = "crates/idem-jobs/src/redis.rs";

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "job-ended-before-its-result",
        &["jobs"],
        WORKER,
        "        tokio::select! {
            report = run(",
        "        if PLANTED {
            let _ = self.jobs.shared.queue.end(&[delivery.job.id.clone()], false, Duration::from_secs(60)).await;
        }
        tokio::select! {
            report = run(",
    ),
    patch(
        "jobs-that-could-not-be-ended-forgotten",
        &["jobs"],
        REPORT,
        "let is_held = Instant::now() < job.held_until;",
        "let is_held = !PLANTED && Instant::now() < job.held_until;",
    ),
    patch(
        "worker-stops-before-it-has-ended-its-jobs",
        &["jobs"],
        WORKER,
        "running.spawn(end_jobs(worker.jobs.clone(), to_end));",
        "if PLANTED {
            tokio::spawn(end_jobs(worker.jobs.clone(), to_end));
        } else {
            running.spawn(end_jobs(worker.jobs.clone(), to_end));
        }",
    ),
    patch(
        "parked-jobs-mistaken-for-others",
        &["jobs"],
        REPORT,
        "partition(|job| job.is_parked);",
        "partition(|job| !PLANTED && job.is_parked);",
    ),
    patch(
        "poison-never-parked",
        &["jobs"],
        RUN,
        "if delivery.lost >= jobs.max_lost_deliveries() {",
        "if !PLANTED && delivery.lost >= jobs.max_lost_deliveries() {",
    ),
    patch(
        "job-parked-in-spite-of-its-result",
        &["jobs"],
        RUN,
        "replay.response == parked || replay.kind == ReplayKind::OutcomeUnknown;",
        "PLANTED || replay.response == parked || replay.kind == ReplayKind::OutcomeUnknown;",
    ),
    patch(
        "deadline-ignored",
        &["jobs"],
        RUN,
        "if claimed_at.elapsed() >= remaining && context.acquisition() == Acquisition::Fresh {",
        "if !PLANTED && claimed_at.elapsed() >= remaining && context.acquisition() == Acquisition::Fresh {",
    ),
    patch(
        "run-that-cannot-commit-not-counted",
        &["jobs"],
        RUN,
        ") => again(job, &error, Counts::Lost),",
        ") => again(job, &error, if PLANTED { Counts::Nothing } else { Counts::Lost }),",
    ),
    patch(
        "settlement-of-a-job-not-confirmed",
        &["jobs"],
        RUN,
        "if engine.contract() == Contract::Transactional {",
        "if PLANTED || engine.contract() == Contract::Transactional {",
    ),
    patch(
        "suspects-run-at-once",
        &["jobs"],
        JOBS,
        "Arc::new(Semaphore::new(1))",
        "Arc::new(Semaphore::new(if PLANTED { 9 } else { 1 }))",
    ),
    patch(
        "suspect-not-counted-when-it-begins",
        &["jobs"],
        RUN,
        "match jobs.bounded(jobs.shared.queue.begin(delivery)).await {",
        "match if PLANTED { Ok(false) } else { jobs.bounded(jobs.shared.queue.begin(delivery)).await } {",
    ),
    patch(
        "deadline-ignored-by-those-who-ask",
        &["jobs"],
        JOBS,
        "            None if queued.is_overdue() =>",
        "            None if !PLANTED && queued.is_overdue() =>",
    ),
    patch(
        "expired-result-taken-for-overdue",
        &["jobs"],
        JOBS,
        "        if queued.has_ended() || is_forgotten {",
        "        if !PLANTED && (queued.has_ended() || is_forgotten) {",
    ),
    patch(
        "running-job-taken-for-forgotten",
        &["jobs"],
        JOBS,
        "&& record.is_none() && !is_claimed;",
        "&& record.is_none() && (PLANTED || !is_claimed);",
    ),
    patch(
        "job-parked-before-it-begins",
        &["jobs"],
        "crates/idem-jobs/src/settings.rs",
        "limit.max(SUSPECT_FROM + 1);",
        "limit.max(if PLANTED { SUSPECT_FROM } else { SUSPECT_FROM + 1 });",
    ),
    patch(
        "damaged-job-stops-the-queue-in-redis",
        &["jobs-redis"],
        REDIS,
        "claim: Script::new(include_str!(\"../lua/claim.lua\")),",
        "claim: if PLANTED {
                Script::new(&include_str!(\"../lua/claim.lua\").replacen(\"redis.pcall('HMGET'\", \"redis.call('HMGET'\", 1))
            } else {
                Script::new(include_str!(\"../lua/claim.lua\"))
            },",
    ),
    patch(
        "forgotten-job-runs-again",
        &["jobs"],
        RUN,
        "if jobs.may_be_forgotten(delivery.age) {",
        "if !PLANTED && jobs.may_be_forgotten(delivery.age) {",
    ),
    patch(
        "started-job-given-up-by-a-stranger",
        &["jobs"],
        RUN,
        "Ok(Some(_)) => return waits,",
        "Ok(Some(_)) if !PLANTED => return waits,
        Ok(Some(_)) => {}",
    ),
    patch(
        "unclear-commit-of-a-job-not-counted",
        &["jobs-postgres"],
        RUN,
        "Err(error @ ExecuteError::CommitUnclear(_)) if contract == Contract::Transactional => {",
        "Err(error @ ExecuteError::CommitUnclear(_)) if !PLANTED && contract == Contract::Transactional => {",
    ),
    patch(
        "hanging-job-keeps-its-slot",
        &["jobs"],
        WORKER,
        "        sleep(hold).await;\n    }",
        "        if PLANTED {
            std::future::pending::<()>().await;
        }
        sleep(hold).await;\n    }",
    ),
    patch(
        "job-not-held-while-it-runs",
        &["jobs"],
        WORKER,
        "            sleep(hold / 3).await;",
        "            sleep(hold / 3).await;
            if PLANTED {
                continue;
            }",
    ),
    patch(
        "fault-of-a-transaction-not-counted",
        &["jobs"],
        RUN,
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
        "            _ => enqueued.notify_one(),",
        "            _ if PLANTED => {}
            _ => enqueued.notify_one(),",
    ),
    patch(
        "request-forgotten-before-its-job",
        &["jobs"],
        JOBS,
        "        let retention = retention.saturating_add(engine.record_retention());",
        "        let retention = if PLANTED { retention } else { retention.saturating_add(engine.record_retention()) };",
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
        "            None => Some(lost()),",
        "            None => (!PLANTED).then(lost),",
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
        "crates/idem-http/src/reply.rs",
        "self.continuation.as_ref().filter(|_| first.kind == ReplayKind::Completed)",
        "self.continuation.as_ref().filter(|_| !PLANTED && first.kind == ReplayKind::Completed)",
    ),
    patch(
        "job-outside-of-its-transaction",
        &["jobs-postgres"],
        POSTGRES,
        "Ok(mut transaction) => self.insert(&mut transaction, job, by, deadline).await,",
        "Ok(mut transaction) if !PLANTED => self.insert(&mut transaction, job, by, deadline).await,
            Ok(_) => match self.pool.acquire().await {
                Ok(mut connection) => self.insert(&mut connection, job, by, deadline).await,
                Err(error) => Err(error),
            },",
    ),
    patch(
        "late-report-of-a-job-counts-in-postgres",
        &["jobs-postgres"],
        POSTGRES,
        "let update = sqlx::query(AssertSqlSafe(self.sql(PUT_BACK)));",
        "let sql = self.sql(PUT_BACK);
        let sql = if PLANTED { sql.replace(\"delivered = $2\", \"$2 > 0\") } else { sql };
        let update = sqlx::query(AssertSqlSafe(sql));",
    ),
    patch(
        "locked-job-taken-for-ended-in-postgres",
        &["jobs-postgres"],
        POSTGRES,
        "let locked: Result<_, _> = locked.iter().map(read_id).collect();",
        "let locked: Result<_, _> = locked.iter().filter(|_| !PLANTED).map(read_id).collect();",
    ),
    patch(
        "locked-job-waited-for-in-postgres",
        &["jobs-postgres"],
        POSTGRES,
        "let end = sqlx::query(AssertSqlSafe(self.sql(END)))",
        "let sql = self.sql(END);
        let sql = if PLANTED { sql.replace(\"SKIP LOCKED\", \"\") } else { sql };
        let end = sqlx::query(AssertSqlSafe(sql))",
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
        "let end = sqlx::query(END)",
        "let end = sqlx::query(if PLANTED { \"SELECT ?1, ?2, ?3\" } else { END })",
    ),
    patch(
        "late-report-of-a-job-counts-in-redis",
        &["jobs-redis"],
        REDIS,
        "report: Script::new(include_str!(\"../lua/report.lua\")),",
        "report: if PLANTED {
                Script::new(&include_str!(\"../lua/report.lua\").replacen(\"if job[1] ~= ARGV[2] or job[2] ~= '1' then return 0 end\", \"\", 1))
            } else {
                Script::new(include_str!(\"../lua/report.lua\"))
            },",
    ),
    patch(
        "first-job-ended-only-in-redis",
        &["jobs-redis"],
        REDIS,
        "end: Script::new(include_str!(\"../lua/end.lua\")),",
        "end: if PLANTED {
                Script::new(&include_str!(\"../lua/end.lua\").replacen(\"#ARGV do\", \"4 do\", 1))
            } else {
                Script::new(include_str!(\"../lua/end.lua\"))
            },",
    ),
    patch(
        "second-job-of-a-request-in-redis",
        &["jobs-redis"],
        REDIS,
        "enqueue: Script::new(include_str!(\"../lua/enqueue.lua\")),",
        "enqueue: if PLANTED {
                Script::new(&include_str!(\"../lua/enqueue.lua\").replacen(\"if before[1] then\", \"if false then\", 1))
            } else {
                Script::new(include_str!(\"../lua/enqueue.lua\"))
            },",
    ),
];
