//! What all requests of a console share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{Inspect, Operate, OwnerToken, SecretTooShort};

use crate::access::Access;
use crate::forgery::Secret;
use crate::survey::Survey;

/// How long a resolved record is kept by default: as long as the engine keeps records.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// A console for the records of one store.
///
/// It reads the store for each page. A visit of the overview also begins a count of all records in the background, in parts of 1,000,
/// unless one runs or has just ended. The pause after a count is 19 times as long as the count, but 30 seconds at least and 10 minutes
/// at most.
#[derive(Clone)]
pub struct Console {
    pub(crate) inspect: Arc<dyn Inspect>,
    pub(crate) operate: Arc<dyn Operate>,
    pub(crate) access: Arc<dyn Access>,
    pub(crate) secret: Option<Secret>,
    pub(crate) retention: Duration,
    pub(crate) survey: Arc<Survey>,
}

impl Console {
    /// A console that reads by `inspect` and repairs by `operate`, usually one store. `access` says who may do what.
    #[must_use]
    pub fn new(inspect: Arc<dyn Inspect>, operate: Arc<dyn Operate>, access: Arc<dyn Access>) -> Self {
        // 244 random bits, from the operating system.
        let secret = [OwnerToken::random(), OwnerToken::random()].map(|token| *token.as_bytes()).concat();
        let (retention, survey) = (RETENTION, Arc::default());
        Self { inspect, operate, access, secret: Secret::new(&secret), retention, survey }
    }

    /// The secret by which forms are recognised, at least 32 random bytes. It must be the same in all processes that serve the console.
    ///
    /// Default: a random one, so that a form from one process is refused by another one, and after a restart.
    ///
    /// # Errors
    /// [`SecretTooShort`] if it has less than 32 bytes.
    pub fn form_secret(self, secret: &[u8]) -> Result<Self, SecretTooShort> {
        if secret.len() < 32 {
            return Err(SecretTooShort { bytes: secret.len() });
        }
        Ok(Self { secret: Secret::new(secret), ..self })
    }

    /// How long a resolved record is kept from then on; never for less than before.
    ///
    /// Default: 24 hours, as the engine keeps records. Give the retention of your engine, if it is another one.
    #[must_use]
    pub fn retention(self, retention: Duration) -> Self {
        Self { retention, ..self }
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Console");
        shown.field("inspect", &self.inspect).field("operate", &self.operate).field("retention", &self.retention);
        shown.finish_non_exhaustive()
    }
}
