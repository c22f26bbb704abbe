//! Five ways to make an operation safe to repeat. `docs/choosing.md` says which to take when.

pub mod broker_deduplication;
pub mod client_chosen_id;
pub mod etag;
pub mod idempotency_key;
pub mod unique_constraint;
