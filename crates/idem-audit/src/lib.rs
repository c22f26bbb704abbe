#![doc = include_str!("../README.md")]

mod entry;
mod observer;
#[cfg(feature = "postgres")]
mod postgres;
mod sink;
mod writer;

pub use self::entry::AuditEntry;
pub use self::observer::AuditObserver;
#[cfg(feature = "postgres")]
pub use self::postgres::PostgresAuditSink;
pub use self::sink::AuditSink;
pub use self::writer::AuditWriter;
