//! Connections: the server, connect options, settings, and the sessions of handlers' transactions.

pub(crate) mod application_pool;
pub(crate) mod blockers;
pub(crate) mod handler_connection;
pub(crate) mod idle;
pub(crate) mod options;
pub(crate) mod server;
pub(crate) mod session;
pub(crate) mod sessions;
pub(crate) mod settings;
pub(crate) mod source;
pub(crate) mod unanswered;
