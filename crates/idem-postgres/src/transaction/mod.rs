//! Transactions that handlers make their business writes in: the store's, the caller's that a run joins, and the guard for
//! writes in transactions that no run joins.

pub(crate) mod begin;
pub(crate) mod guard;
pub(crate) mod handler_transaction;
pub(crate) mod join;
pub(crate) mod run;
pub(crate) mod statements;
