//! The error that ends a run before its report.

/// It is only shown.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;
