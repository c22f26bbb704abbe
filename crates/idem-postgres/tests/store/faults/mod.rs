//! The store while its server, or the way to it, fails: what is acknowledged is there, what is not acknowledged is an
//! error in time, and nothing has to be opened again.

mod crowded;
mod lost_answers;
mod outages;
mod refusals;
mod replicas;
mod sessions;
mod standby;
mod terminated;
