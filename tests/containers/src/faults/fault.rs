//! Faults of a container.

use crate::Error;
use crate::container::{Container, Network};
use crate::docker::docker;

#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    /// All its processes stand still; the kernel accepts what is sent to it.
    Pause,
    /// It is killed.
    Kill,
    /// It is shut down properly.
    Stop,
    /// It is on no network, so that peers do not learn of the end of a connection.
    Disconnect,
}

impl Fault {
    pub(super) const ALL: [Self; 4] = [Self::Pause, Self::Kill, Self::Stop, Self::Disconnect];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Kill => "kill",
            Self::Stop => "restart",
            Self::Disconnect => "disconnect",
        }
    }

    pub(super) async fn strike(self, network: &Network, server: &Container) -> Result<(), Error> {
        match self {
            Self::Pause => docker(&["pause", server.host()]).await?,
            Self::Kill => docker(&["kill", server.host()]).await?,
            Self::Stop => docker(&["stop", "--time=30", server.host()]).await?,
            Self::Disconnect => docker(&["network", "disconnect", network.name(), server.host()]).await?,
        };
        Ok(())
    }

    /// Undoes the fault. The container may have another address afterwards.
    pub(super) async fn heal(self, network: &Network, server: &Container) -> Result<(), Error> {
        match self {
            Self::Pause => docker(&["unpause", server.host()]).await?,
            Self::Kill | Self::Stop => docker(&["start", server.host()]).await?,
            Self::Disconnect => docker(&["network", "connect", network.name(), server.host()]).await?,
        };
        Ok(())
    }
}
