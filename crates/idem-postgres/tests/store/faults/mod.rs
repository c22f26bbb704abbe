//! The store while its server, or the network to it, fails. What was acknowledged is there. Every other call fails in time.
//! The application need not open the store again.

mod crowded;
mod lost_answers;
mod mixed_up;
mod outages;
mod refusals;
mod replicas;
mod sessions;
mod standby;
mod terminated;
mod unanswered;
