//! Whatever ends a run before its report.

/// It is shown, and never looked into.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;
