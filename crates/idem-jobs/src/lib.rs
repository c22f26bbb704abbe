#![doc = include_str!("../README.md")]

mod job;
mod jobs;
#[cfg(feature = "postgres")]
mod postgres;
mod queue;
#[cfg(feature = "redis")]
mod redis;
mod settings;
#[cfg(feature = "sqlite")]
mod sqlite;
mod worker;

pub use self::job::{Delivery, EnqueuedBefore, InvalidJobId, Job, JobId, QueuedJob, SUSPECT_FROM, Standing, Times};
pub use self::jobs::{Accepted, InvalidJobs, JobState, Jobs};
#[cfg(feature = "postgres")]
pub use self::postgres::PostgresQueue;
pub use self::queue::{EnqueueError, JobQueue};
#[cfg(feature = "redis")]
pub use self::redis::RedisQueue;
pub use self::settings::JobSettings;
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteQueue;
pub use self::worker::{JobError, Worker};
