//! What operators and tasks ask of an open store: health, privileges, and the removal of expired records.

pub(crate) mod health;
pub(crate) mod identity;
mod inspect;
pub(crate) mod partitions;
mod place;
pub(crate) mod pool;
pub(crate) mod privileges;
pub(crate) mod purge;
mod repairs;
