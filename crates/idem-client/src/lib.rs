#![doc = include_str!("../README.md")]

mod answer;
mod backoff;
#[cfg(feature = "reqwest")]
mod clock;
#[cfg(feature = "reqwest")]
mod error;
#[cfg(feature = "reqwest")]
mod exchange;
#[cfg(feature = "reqwest")]
mod hosts;
#[cfg(feature = "journal")]
mod journal;
#[cfg(feature = "reqwest")]
mod keep;
#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "reqwest")]
mod middleware;
#[cfg(feature = "reqwest")]
mod observer;
#[cfg(feature = "reqwest")]
mod operation;
mod profile;
#[cfg(feature = "reqwest")]
mod report;
mod retry_after;
#[cfg(feature = "reqwest")]
mod run;
#[cfg(feature = "reqwest")]
mod settings;
mod table;

pub use answer::{Answer, Failure};
pub use backoff::Backoff;
#[cfg(feature = "reqwest")]
pub use error::{Error, ErrorKind};
#[cfg(feature = "journal")]
pub use journal::{
    ClockFault, Journal, JournalConfig, JournalError, JournalErrorKind, JournaledAnswer, PendingOperation, ResumeError,
};
#[cfg(feature = "metrics")]
pub use metrics::MetricsObserver;
#[cfg(feature = "reqwest")]
pub use middleware::client;
#[cfg(feature = "reqwest")]
pub use observer::{Event, EventKind, Observer};
#[cfg(feature = "reqwest")]
pub use operation::Operation;
pub use profile::Profile;
#[cfg(feature = "reqwest")]
pub use report::Report;
#[cfg(feature = "reqwest")]
pub use settings::Settings;
pub use table::{Decision, RetryPolicy, Stop};
