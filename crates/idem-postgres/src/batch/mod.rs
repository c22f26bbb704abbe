//! Verbs that wait go to the database together, in one statement.

pub(crate) mod arguments;
pub(crate) mod batcher;
pub(crate) mod kind;
pub(crate) mod queue;
pub(crate) mod row;
pub(crate) mod single;
pub(crate) mod statement;
pub(crate) mod verb;
