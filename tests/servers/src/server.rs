//! What kinds of server have in common.

use std::fmt;

use crate::Error;

/// A process of this machine, or a container. The verbs are those of [`Postgres`](crate::Postgres).
pub(crate) trait Server: fmt::Debug + Send + Sync {
    fn port(&self) -> u16;
    fn version(&self) -> &str;
    fn origin(&self) -> &str;
    fn start_again(&mut self) -> Result<(), Error>;
    fn stop(&mut self) -> Result<(), Error>;
    fn kill(&mut self) -> Result<(), Error>;
    fn pause(&mut self) -> Result<(), Error>;
    fn resume(&mut self) -> Result<(), Error>;
}
