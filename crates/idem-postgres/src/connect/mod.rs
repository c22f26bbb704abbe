//! Connections: the server that they lead to, their options and settings, and those that handlers use one after another.

pub(crate) mod application_pool;
pub(crate) mod blockers;
pub(crate) mod handler_connection;
pub(crate) mod options;
pub(crate) mod server;
pub(crate) mod session;
pub(crate) mod sessions;
pub(crate) mod settings;
pub(crate) mod source;
