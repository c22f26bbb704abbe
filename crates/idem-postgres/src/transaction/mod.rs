//! Transactions that handlers make their business writes in, and the guard for writes in transactions of their own.

pub(crate) mod begin;
pub(crate) mod guard;
pub(crate) mod handler_transaction;
pub(crate) mod statements;
