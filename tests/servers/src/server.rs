//! The interface that all kinds of server share.

use std::fmt;

use crate::Error;

/// A process of this machine, or a container. The methods are those of [`Postgres`](crate::Postgres).
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

    /// Suspends it as [`pause`](Self::pause) does, with all its children.
    fn freeze(&mut self) -> Result<(), Error> {
        self.pause()
    }

    /// Ends a [`freeze`](Self::freeze).
    fn thaw(&mut self) -> Result<(), Error> {
        self.resume()
    }

    /// Sets whether there is room for another byte in any of its files.
    fn set_room(&mut self, _: bool) -> Result<(), Error> {
        Err(Error::failed("the disk of a container cannot be filled"))
    }

    /// Restarts it with a private clock, if it can have one.
    fn give_clock(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn shift_clock(&mut self, _seconds: i64) -> Result<(), Error> {
        Err(Error::failed("the server has the clock of this machine"))
    }
}
