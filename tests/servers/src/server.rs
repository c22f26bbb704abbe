//! What kinds of server have in common.

use std::fmt;

use crate::Error;

/// A process of this machine, or a container. The verbs are those of [`Postgres`](crate::Postgres).
pub(crate) trait Server: fmt::Debug + Send + Sync {
    fn port(&self) -> u16;
    fn version(&self) -> &str;
    fn origin(&self) -> &str;
    fn log(&self) -> Result<String, Error>;
    fn start_again(&mut self) -> Result<(), Error>;
    fn stop(&mut self) -> Result<(), Error>;
    fn kill(&mut self) -> Result<(), Error>;
    fn pause(&mut self) -> Result<(), Error>;
    fn resume(&mut self) -> Result<(), Error>;

    /// [`pause`](Self::pause), with every child of it.
    fn freeze(&mut self) -> Result<(), Error> {
        self.pause()
    }

    /// Ends a [`freeze`](Self::freeze).
    fn thaw(&mut self) -> Result<(), Error> {
        self.resume()
    }

    /// Whether there is room for another byte in any file of its.
    fn set_room(&mut self, _: bool) -> Result<(), Error> {
        Err(Error::failed("the disk of a container cannot be filled"))
    }

    /// Starts it again with a clock of its own, where it can have one.
    fn give_clock(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn shift_clock(&mut self, _seconds: i64) -> Result<(), Error> {
        Err(Error::failed("the server has the clock of this machine"))
    }
}
