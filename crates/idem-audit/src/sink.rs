//! The port for the place where decisions are stored.

use std::error::Error;
use std::fmt;

use async_trait::async_trait;
use uuid::Uuid;

use crate::entry::AuditEntry;

/// Stores entries.
#[async_trait]
pub trait AuditSink: fmt::Debug + Send + Sync + 'static {
    /// Stores a batch as a whole or not at all. It needs a timeout of its own.
    ///
    /// A batch whose answer was lost comes again with the same id. Its entries must not be stored twice.
    ///
    /// # Errors
    /// Any error. The batch is tried again, unless the error is [permanent](Self::is_permanent).
    async fn write(&self, batch: Uuid, entries: &[AuditEntry]) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// Whether this error of [`write`](Self::write) would come again for the same batch.
    ///
    /// The batch is then dropped at once, so that those behind it are written in time. Default: no error is permanent.
    fn is_permanent(&self, error: &(dyn Error + Send + Sync + 'static)) -> bool {
        let _ = error;
        false
    }
}
