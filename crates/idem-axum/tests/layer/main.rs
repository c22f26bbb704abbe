//! The layer in a router: what a client gets, how often the handler runs, and what a repeat gets.

mod admission;
mod directives;
mod ends;
mod extractors;
mod request_bodies;
mod response_bodies;
mod routing;
mod stacking;
mod stores;
mod support;
mod transactions;
